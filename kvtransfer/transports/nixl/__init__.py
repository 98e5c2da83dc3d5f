"""NIXL over UCX: CUDA and RDMA, host memory too.

May import kvrelay, kvtransfer/mover, kvtransfer/transports.
"""
