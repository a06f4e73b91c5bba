"""Keep `uv.lock` free of any registry's address: `python .ci/lock.py` rewrites it, `--check` says whether it is clean.

uv writes where it found each file. A lock that names no host works on every mirror: without its `[options]` table uv
resolves once more on a clean clone, prefers the locked versions, and writes the full lock locally (so a working copy's
`uv.lock` shows as modified after the first run; run this script before committing it).
"""

import argparse
import re
import sys
from pathlib import Path


def without_addresses(lock: str) -> str:
    """The lock with neutral sources and file names for addresses; hashes and sizes stay."""
    lock = re.sub(r'registry = "[^"]*"', 'registry = "wheelhouse"', lock)
    lock = re.sub(r'url = "[^"]*/([^"/]+)"', r'path = "\1"', lock)
    return re.sub(r"^\[options\]\n(?:(?!\[).*\n)*", "", lock, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the lock is not clean")
    parser.add_argument("file", nargs="?", type=Path, default=Path("uv.lock"), help="the lock, or - for standard input")
    args = parser.parse_args()
    lock = sys.stdin.read() if str(args.file) == "-" else args.file.read_text()
    clean = without_addresses(lock)
    if args.check:
        if lock != clean or "://" in lock:
            sys.exit(f"{args.file} names addresses or has an [options] table: run python .ci/lock.py")
    else:
        args.file.write_text(clean)


if __name__ == "__main__":
    main()
