"""Other KV cache managers as sides of `helicore bench kv`; each runs in a process of its own.

An adapter calls what a package publishes and holds no code of it. Nothing here is needed to use
helicore, and nothing imports it except the benchmark's worker process.
"""
