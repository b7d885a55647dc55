#!/bin/sh
# Opens Impasto, or does what run.py is told by further words; stays open when that fails.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=
for name in python3 python3.12 python3.13 python3.11 python3.14 python; do
    if command -v "$name" >/dev/null 2>&1; then python=$name && break; fi
done
if [ -n "$python" ]; then
    "$python" "$here/run.py" "$@"
    code=$?
else
    echo "Impasto needs Python 3.11 to 3.14, and none was found. Install it with your system's package manager."
    code=1
fi
if [ "$code" -ne 0 ] && [ -t 0 ]; then
    printf 'Press Enter to close. '
    read -r _
fi
exit "$code"
