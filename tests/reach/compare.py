"""Which basic blocks of mlua no test of CI's run under sanitizers reaches, though one of tests/plain.list does.

    compare.py FOLDER PROGRAM TEST    FOLDER: what blocks.c wrote; PROGRAM, TEST: build/reach/mlua and test (make reach)

A block is a call of __sanitizer_cov_trace_pc, known in both programs by its function and its place in it.
Kernels and emulated kernels (areas that plain.list names whole) are left out. Exit code 1 where there are such blocks."""
import bisect, os, re, subprocess, sys

SPACING = 4  # of blocks.c


def lines(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def functions(path):
    found, base = [], 0
    for line in lines("nm", "-S", path):
        words = line.split()
        if words[-1] == "__executable_start":
            base = int(words[0], 16)
        if len(words) == 4 and words[2] in "tT":
            found.append((int(words[0], 16), int(words[1], 16), words[3]))
    return base, sorted(found)


def sites(path, known):
    """The block of each byte of a file: (function, its size, offset in it), of functions that are known."""
    base, found = functions(path)
    starts, result, after = [f[0] for f in found], {}, False
    for line in lines("objdump", "-d", "--no-show-raw-insn", path):
        if after:
            at = int(line.split(":")[0], 16)
            start, size, name = found[bisect.bisect_right(starts, at) - 1]
            if known is None or (name, size) in known:
                result[(at - base) // SPACING] = (name, size, at - start)
        after = "call" in line and "<__sanitizer_cov_trace_pc" in line
    return result


def marks(path):
    """Places of the bytes that are set, of a file with holes."""
    with open(path, "rb") as file:
        at = 0
        while True:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            data = os.pread(file.fileno(), end - at, at)
            yield from (at + m.start() for m in re.finditer(b"\x01", data))
            at = end


def main(folder, program, test):
    known = {(name, size) for _, size, name in functions(program)[1]}
    blocks = {"mlua": sites(program, None), "test": sites(test, known)}
    plain = [line.strip() for line in open("tests/plain.list") if line.strip() and line[0] != "#"]
    areas = tuple(name for name in plain if name.endswith("/"))
    sanitized, others = set(), {}
    for name in sorted(os.listdir(folder)):
        test_name, kind = name.rsplit(".", 1)
        test_name = test_name.replace("@", "/")
        if kind not in blocks or test_name.startswith(areas):
            continue
        reached = {blocks[kind][at] for at in marks(os.path.join(folder, name)) if at in blocks[kind]}
        if test_name in plain:
            for block in reached:
                others.setdefault(block, test_name)
        else:
            sanitized |= reached
    missing = sorted((name, offset, by) for (name, size, offset), by in others.items() if (name, size, offset) not in sanitized)
    for name, offset, by in missing:
        print(f"{name}+0x{offset:x}: reached by {by} alone")
    print(f"{len(sanitized)} blocks are reached by tests that run under sanitizers, {len(missing)} more by those of tests/plain.list")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
