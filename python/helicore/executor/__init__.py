"""The executor: sequences, scheduler, batch, runner, sampler and the engine that steps them."""
