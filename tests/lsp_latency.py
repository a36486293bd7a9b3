#!/usr/bin/env python3
"""Times of `mlua lsp` after a keystroke: until the diagnostics of the edited text, of a hover and of a completion, at the
median and the 95th percentile; the server's memory before and after.

    python3 tests/lsp_latency.py [--mlua build/mlua] [--edits 100] [--script models/gpt_moe.lua]
        [--settings preset=moe-64x,batch=64] [--mesh ep=8,dp=8] [--device h200]
    python3 tests/lsp_latency.py --memory 10000 --script models/gpt.lua --settings "" --mesh ""

With --memory so many random edits in one session, insertions, deletions and moves: the server's memory on the way, and whether
the last text has the diagnostics that a new server gives it.
"""
import argparse
import json
import os
import random
import subprocess
import time


class Server:
    def __init__(self, binary, root, options):
        self.process = subprocess.Popen([binary, "lsp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.count, self.versions, self.shown = 0, {}, {}
        self.request("initialize", {"rootUri": "file://" + root, "capabilities": {}, "initializationOptions": options})
        self.notify("initialized", {})

    def send(self, message):
        body = json.dumps(dict(message, jsonrpc="2.0")).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def receive(self):
        length = 0
        while True:
            line = self.process.stdout.readline()
            if line in (b"\r\n", b""):
                break
            length = int(line.split(b":")[1])
        message = json.loads(self.process.stdout.read(length))
        if message.get("method") == "textDocument/publishDiagnostics":
            self.versions[message["params"]["uri"]] = message["params"]["version"]
            self.shown[message["params"]["uri"]] = message["params"]["diagnostics"]
        return message

    def notify(self, method, params):
        self.send({"method": method, "params": params})

    def request(self, method, params):
        self.count += 1
        self.send({"id": self.count, "method": method, "params": params})
        while True:
            message = self.receive()
            if message.get("id") == self.count and "method" not in message:
                return message

    def diagnosed(self, uri, version):
        while self.versions.get(uri) != version:
            self.receive()

    def open(self, uri, text):
        self.notify("textDocument/didOpen", {"textDocument": {"uri": uri, "languageId": "lua", "version": 0, "text": text}})
        self.diagnosed(uri, 0)

    def processor(self):
        """Seconds of the server and of the processes that traced."""
        with open("/proc/%d/stat" % self.process.pid) as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        ticks = os.sysconf("SC_CLK_TCK")
        return (int(fields[11]) + int(fields[12])) / ticks, (int(fields[13]) + int(fields[14])) / ticks

    def memory(self):
        with open("/proc/%d/status" % self.process.pid) as status:
            return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def random_edit(text):
    """A text with a part inserted, deleted or moved, and the change as the protocol says it."""
    begin = random.randrange(len(text) + 1)
    end, part = begin, random.choice(["end", "(", "}", "x:dot(", "self.", '"embed"', "\n", " = ", "local y = x\n", "--[["])
    if random.random() < 0.5:
        end, at = min(begin + random.randrange(40), len(text)), random.randrange(len(text) + 1)
        part = text[at:at + 40] if random.random() < 0.5 else ""

    def place(offset):
        return {"line": text.count("\n", 0, offset), "character": offset - (text.rfind("\n", 0, offset) + 1)}

    return text[:begin] + part + text[end:], {"range": {"start": place(begin), "end": place(end)}, "text": part}


def measure_memory(given, start, uri, original):
    server, text, random_methods = start(), original, ["hover", "completion", "references"]
    random.seed(1)
    server.open(uri, text)
    for version in range(1, given.memory + 1):
        changes = []
        if version % 10 == 0:  # else texts stay broken
            text = original
            changes.append({"text": original})
        if version % 10 != 0 or version == given.memory:
            text, change = random_edit(text)
            changes.append(change)
        server.notify("textDocument/didChange", {"textDocument": {"uri": uri, "version": version}, "contentChanges": changes})
        if version % 5 == 0:
            line = random.randrange(text.count("\n") + 1)
            server.request("textDocument/" + random.choice(random_methods), {
                "textDocument": {"uri": uri}, "position": {"line": line, "character": 6}, "context": {"includeDeclaration": True}})
        if version % 20 == 0 or version == given.memory:
            server.diagnosed(uri, version)
        if version in (100, 1000) or version % 2000 == 0:
            print("after %5d edits %.1f MiB" % (version, server.memory()), flush=True)
    fresh = start()
    fresh.open(uri, text)
    print("diagnostics of the last text: %s" % ("as a new server's" if fresh.shown[uri] == server.shown[uri] else "STALE"))
    for each in server, fresh:
        each.request("shutdown", None)
        each.notify("exit", None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlua", default="build/mlua")
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--script", default="models/gpt_moe.lua")
    parser.add_argument("--settings", default="preset=moe-64x,batch=64")
    parser.add_argument("--mesh", default="ep=8,dp=8")
    parser.add_argument("--device", default="h200")
    given = parser.parse_args()
    options = {"trusted": True, "device": given.device}
    if given.mesh:
        options["mesh"] = given.mesh
    if given.settings:
        options["settings"] = dict(item.split("=") for item in given.settings.split(","))
    root = os.getcwd()
    with open(given.script) as file:
        text = file.read()
    uri = "file://%s/%s" % (root, given.script)
    if given.memory:
        return measure_memory(given, lambda: Server(given.mlua, root, options), uri, text)
    server = Server(given.mlua, root, options)
    document = {"uri": uri}
    begin = time.monotonic()
    server.open(uri, text)
    opened = time.monotonic() - begin
    lines = text.split("\n")
    random.seed(1)
    times = {"diagnostics": [], "hover": [], "completion": []}
    before, (own, traces) = server.memory(), server.processor()
    for version in range(1, 2 * given.edits, 2):
        line = random.randrange(len(lines))
        at = {"line": line, "character": 0}
        begin = time.monotonic()
        server.notify("textDocument/didChange", {"textDocument": {"uri": uri, "version": version}, "contentChanges": [
            {"range": {"start": at, "end": at}, "text": random.choice([" ", "x", "\n", "-- note\n"])}]})
        place = {"textDocument": document, "position": {"line": line, "character": len(lines[line]) // 2}}
        for method in "hover", "completion":
            asked = time.monotonic()
            server.request("textDocument/" + method, place)
            times[method].append(time.monotonic() - asked)
        server.diagnosed(uri, version)
        times["diagnostics"].append(time.monotonic() - begin)
        server.notify("textDocument/didChange", {"textDocument": {"uri": uri, "version": version + 1}, "contentChanges": [{"text": text}]})
        server.diagnosed(uri, version + 1)
    print("opened in %.0f ms" % (1e3 * opened))
    for name, list_of in times.items():
        list_of.sort()
        print("%-12s median %5.0f ms  95 %% %5.0f ms  most %5.0f ms" % (
            name, 1e3 * list_of[len(list_of) // 2], 1e3 * list_of[int(0.95 * (len(list_of) - 1))], 1e3 * list_of[-1]))
    now, of_traces = server.processor()
    print("processor time of an edit: server %.0f ms, its traces %.0f ms (an edit, and its undoing: two)" % (
        1e3 * (now - own) / given.edits, 1e3 * (of_traces - traces) / given.edits))
    print("memory of the server %.1f MiB, at first %.1f MiB" % (server.memory(), before))
    server.request("shutdown", None)
    server.notify("exit", None)


main()
