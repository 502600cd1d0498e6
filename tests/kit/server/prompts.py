#!/usr/bin/env python3
"""Send 32 prompts of token ids to an SGLang server and write its greedy tokens as JSON.

    prompts.py URL FILE [--new 12] [--at-once 16]

Lengths lie between 20 and 900 tokens; every third prompt starts with the first 300 tokens of
the one before it, so that prefixes come from the radix cache.
"""

import argparse
import concurrent.futures
import json
import urllib.request


def prompts(count=32):
    state, result = 20260730, []
    for number in range(count):
        length = 20 + (number * 271) % 881
        ids = []
        for _ in range(length):
            state = (1103515245 * state + 12345) % 2**31
            ids.append(2 + (state >> 8) % 2000)
        if number % 3 == 2:
            ids = (result[-1][:300] + ids)[: max(length, 320)]
        result.append(ids)
    return result


def generate(url, ids, new):
    parameters = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": 2}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        reply = json.load(answer)
    top = [[pair[0] for pair in pairs] for pairs in reply["meta_info"]["output_top_logprobs"]]
    return {"tokens": reply["output_ids"], "top_logprobs": top, "cached": reply["meta_info"].get("cached_tokens")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("file")
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        answers = list(pool.map(lambda ids: generate(options.url, ids, options.new), prompts()))
    with open(options.file, "w") as file:
        json.dump(answers, file)
    print(f"{len(answers)} answers, {sum(a['cached'] or 0 for a in answers)} tokens from the cache")


if __name__ == "__main__":
    main()
