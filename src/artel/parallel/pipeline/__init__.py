"""Pipeline parallelism: several processes share the layers."""
