"""The CUDA backend over FlashInfer, Triton and CUDA graphs.

May import kvrelay, kernels, kernels/common, kernels/oracle.
"""
