"""A name SGLang 0.5.20 and later import for Triton kernels of their own."""


def make_kernel_repr(base_name, config_keys, name_key=None):
    return lambda specialization: base_name
