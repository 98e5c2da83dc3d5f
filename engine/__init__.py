"""Models, weights, runner, sampler, step scheduler. Imports kvrelay, kernels, kvcache."""
