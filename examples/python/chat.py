"""One question, answered as it is written.

    python examples/python/chat.py "Write a class for a stack."

The bundled model was trained on source code only: it shows the mechanism, not an assistant.
"""

import sys

from helicore import LLM, SamplingParams


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Write a class for a stack."
    messages = [{"role": "user", "content": question}]
    with LLM("tiny") as llm:
        stream = llm.stream_chat(messages, SamplingParams(max_tokens=64, temperature=0.7, seed=1))
        for piece in stream:
            print(piece, end="", flush=True)
        completion = stream.output.outputs[0]
        print(f"\n--- {completion.finish_reason} after {len(completion.token_ids)} tokens")


if __name__ == "__main__":
    main()
