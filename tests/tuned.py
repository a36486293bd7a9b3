"""Layouts that `mlua tune` considers, each run once: its choices beside the best of them.

    python3 tests/tuned.py list LIST -- models/gpt.lua preset=gpt-1.3b --gpus 2 --device h200 --batch 32
    python3 tests/tuned.py run LIST... --results FILE [--seconds 400]     on the machine with the GPUs; again: those that are missing
    python3 tests/tuned.py show LIST... --results FILE

`list` plans every layout (`mlua tune --every`) and writes at most 24 of those that fit: of each mesh with its options the number of
microbatches that is predicted to be fastest, then the others by predicted time. `run` adds a line to FILE after each layout (the form of
`mlua tune --results`), of all layouts in turn as often as --rounds says. `show` prints predicted and measured tokens/s (medians of the
rounds, and the spread of a layout's rounds), what `mlua tune` chooses, and what `mlua tune --measure` would choose by the measurements of
FILE. Experts that exchange tokens are to be measured once their router is even: before, steps are done again (--steps 60 --last 12).
"""
import argparse, json, os, re, shlex, signal, statistics, subprocess, sys, time

MOST = 24
STEPS, LAST = 7, 4  # of a run; the median of the last ones counts


def tune(a, words, *more):
    done = subprocess.run([a.mlua, "tune", *words, "--json", *more], capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def kind(command):
    """The mesh and its options, without the number of microbatches."""
    return re.sub(r" (accum|microbatches)=\d+|,microbatches=\d+", "", command)


def make_list(a):
    fitting = tune(a, a.words, "--every")["best"]
    first, others, seen = [], [], set()
    for layout in fitting:
        (others if kind(layout["command"]) in seen else first).append(layout)
        seen.add(kind(layout["command"]))
    chosen = (first + others)[:MOST]
    with open(a.lists[0], "w") as f:
        json.dump({"words": a.words, "fitting": len(fitting), "layouts": sorted(chosen, key=lambda l: l["seconds"])}, f, indent=1)
    print(f"{a.lists[0]}: {len(chosen)} of {len(fitting)} layouts that fit")


def results_of(path):
    """By command, its results in their order."""
    known = {}
    if os.path.exists(path):
        for line in open(path):
            if line.endswith("}\n"):  # a run that was cut may have left a part of one
                result = json.loads(line)
                known.setdefault(result["command"], []).append(result)
    return known


def rates_of(results):
    return [r["tokens_per_s"] for r in results if "tokens_per_s" in r]


def run_one(a, command, limit):
    """Tokens/s of the last steps, and the seconds to the end of the first step and of the whole run."""
    words = [a.mlua if w == "mlua" else w for w in shlex.split(command)] + [f"steps={a.steps}", "sample=0", "--json", "--quiet"]
    begin, first, rates = time.time(), None, []
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    signal.alarm(max(1, int(limit)))
    for line in process.stdout:
        step = json.loads(line) if line.startswith("{") else {}
        if "tokens_per_s" in step:
            first = first or time.time() - begin
            rates.append(step["tokens_per_s"])
    errors = process.stderr.read()
    code = process.wait()
    signal.alarm(0)
    seconds = time.time() - begin
    if code or len(rates) < a.steps:
        return {"command": command, "reason": (errors.splitlines() or [f"it ended with {code}"])[0], "seconds": round(seconds, 1)}
    return {"command": command, "tokens_per_s": statistics.median(rates[-a.last:]), "rates": [round(r) for r in rates],
            "first": round(first, 1), "seconds": round(seconds, 1)}


def run(a):
    until = time.time() + a.seconds
    layouts = [layout for path in a.lists for layout in json.load(open(path))["layouts"]]
    for round in range(a.rounds):
        for layout in layouts:
            if len(results_of(a.results).get(layout["command"], [])) > round:
                continue
            if until - time.time() < a.limit:  # a run that is cut says nothing of its layout
                return print("out of time")
            result = run_one(a, layout["command"], a.limit)
            with open(a.results, "a") as f:
                f.write(json.dumps(result) + "\n")
            print(f"{result.get('tokens_per_s', 0):9.0f} {layout['tokens_per_s']:9.0f} {result.get('first', 0):5.1f} {result['seconds']:5.1f} s "
                  f"{short(layout['command'])} {result.get('reason', '')}", flush=True)


def short(command):
    words = shlex.split(command)
    value = lambda name: words[words.index(name) + 1] if name in words else ""
    micro = [w for w in words if w.startswith("accum=") and w != "accum=1"]
    return " ".join([value("--mesh"), re.sub("preset=megatron,|,zero=true$", "", value("--layout")), *micro])


def table(rows):
    """Of (layout, rates): the fastest median, and the errors of the predictions."""
    print("| layout | predicted tokens/s | measured | predicted / measured | of the best | spread |\n| --- | --- | --- | --- | --- | --- |")
    best, errors = max(statistics.median(rates) for _, rates in rows), []
    for l, rates in sorted(rows, key=lambda row: -statistics.median(row[1])):
        rate = statistics.median(rates)
        errors.append(l["tokens_per_s"] / rate - 1)
        print(f"| {short(l['command'])} | {l['tokens_per_s']:,.0f} | {rate:,.0f} | {1 + errors[-1]:.3f} | {rate / best:.3f} | "
              f"{100 * (max(rates) / min(rates) - 1):.1f} % |")
    errors.sort(key=abs)
    print(f"\nfurthest {100 * errors[-1]:.1f} %, median {100 * abs(errors[len(errors) // 2]):.1f} %")
    return best


def show(a):
    known = {command: rates_of(results) for command, results in results_of(a.results).items()}
    for path in a.lists:
        planned = json.load(open(path))
        now = {l["command"]: l for l in tune(a, planned["words"], "--every")["best"]} if a.again else {}
        rows = [(now.get(l["command"], l), known[l["command"]]) for l in planned["layouts"] if known.get(l["command"])]
        print(f"\n{' '.join(planned['words'])}: {planned['fitting']} layouts fit, {len(planned['layouts'])} listed, {len(rows)} measured\n")
        best = table(rows)
        for name, more in (("tune", []), ("tune --measure", ["--measure", "--results", a.results])):
            command = tune(a, planned["words"], *more)["best"][0]["command"]
            got = statistics.median(known[command]) if known.get(command) else None
            print(f"{name}: {short(command)}" + (f", {got / best:.3f} of the best" if got else ", not measured"))


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("what", choices=["list", "run", "show"])
    a.add_argument("lists", nargs="+", metavar="LIST")
    a.add_argument("--mlua", default="build/mlua")
    a.add_argument("--results", default="tuned.jsonl")
    a.add_argument("--seconds", type=float, default=1e9, help="none begins that may end later; a later call makes those that are left")
    a.add_argument("--limit", type=float, default=40, help="seconds of one run")
    a.add_argument("--steps", type=int, default=STEPS)
    a.add_argument("--last", type=int, default=LAST, help="of these steps the median counts")
    a.add_argument("--rounds", type=int, default=1, help="run: how often each layout is measured")
    a.add_argument("--again", action="store_true", help="show: by today's predictions, not those of LIST")
    before, words = sys.argv[1:], []
    if "--" in before:
        at = before.index("--")
        before, words = before[:at], before[at + 1:]
    a = a.parse_args(before)
    a.words = words
    {"list": make_list, "run": run, "show": show}[a.what](a)


if __name__ == "__main__":
    main()
