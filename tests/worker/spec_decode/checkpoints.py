"""What a method of speculative decoding needs besides its name, for a tiny target model.

A function with the name of its file in `servd/worker/spec_decode` makes the checkpoint, seeded, and
returns the rest of `--speculative-config`; a method without one needs nothing.

    def eagle(target: Path, folder: Path) -> dict[str, Any]:
        write_head(folder, read_spec(target).hidden_size)  # `folder` is empty
        return {"model": str(folder)}
"""

from __future__ import annotations
