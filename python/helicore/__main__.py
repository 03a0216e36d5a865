"""`python -m helicore`: the command line, and where C++ projects find the installed library.

--cmake-dir    folder of helicore-config.cmake, for CMAKE_PREFIX_PATH or helicore_DIR
--include-dir  folder to add to the include path
"""

import importlib.util
import sys
from pathlib import Path

_FOLDERS = {"--cmake-dir": "lib/cmake/helicore", "--include-dir": "include"}


def find_folder(relative: str) -> Path:
    """A folder of the installed package; FileNotFoundError when the package has none.

    The native module may lie elsewhere than the Python files: an editable install leaves these in
    the source tree.
    """
    roots = [Path(__file__).parent]
    native = importlib.util.find_spec("helicore._core")
    if native is not None and native.origin is not None:
        roots.insert(0, Path(native.origin).parent)
    for root in roots:
        if (root / relative).is_dir():
            return root / relative
    looked = ", ".join(str(root / relative) for root in roots)
    raise FileNotFoundError(f"this installation has no {relative}; looked in {looked}")


def main() -> None:
    relative = _FOLDERS.get(sys.argv[1]) if len(sys.argv) == 2 else None
    if relative is None:
        from helicore.cli.main import app

        app(prog_name="python -m helicore" if Path(sys.argv[0]).stem == "__main__" else None)
        return
    try:
        print(find_folder(relative))
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
