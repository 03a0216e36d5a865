"""Continues a few prompts with the bundled model, with log-probabilities and a stop string.

python examples/python/offline.py [MODEL]
"""

import sys

from helicore import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    prompts = ["def read_lines(path):\n", "class Stack:\n", "import os\n"]
    params = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=1, stop=["\n\n\n"])
    with LLM(model) as llm:
        for output in llm.generate(prompts, params):
            completion = output.outputs[0]
            print(f"--- {completion.finish_reason}, {len(completion.token_ids)} tokens")
            print(f"{output.prompt}{completion.text}")

        # Greedy, with the two best tokens of each position.
        best = SamplingParams(max_tokens=4, temperature=0, logprobs=2)
        (output,) = llm.generate("for i in", best, use_tqdm=False)
        print("--- log-probabilities after 'for i in'")
        for position in output.outputs[0].logprobs or []:
            choices = (f"{p.decoded_token!r} {p.logprob:.2f}" for p in position.values())
            print("   ", ", ".join(choices))

        counters = llm.counters
        print(f"--- {counters.generation_tokens} tokens in {counters.num_steps} steps")


if __name__ == "__main__":
    main()
