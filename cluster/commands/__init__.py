"""The `kvrelay` command and its subcommands.

May import kvrelay, cluster, cluster/autoscaling, cluster/compiling, cluster/dashboards, cluster/deployments,
cluster/launch, cluster/loadgen, cluster/profiles, cluster/registry, cluster/simulator, cluster/simulator/reporting,
cluster/workloads, engine, kernels, kvcache, kvtransfer, router, serve.
"""
