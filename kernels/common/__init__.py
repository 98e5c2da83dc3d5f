"""What several backends share: sampling, experts, quantisation and cascade rules in plain torch.

May import kernels.
"""
