// The extension of VS Code with a stand-in for the editor: its LanguageClient speaks the protocol to the real server.
// node tests/lsp/vscode.js with MLUA, ROOT and FOLDER set.
const { spawn } = require("child_process");
const fs = require("fs");
const Module = require("module");
const path = require("path");

const root = process.env.ROOT, folder = process.env.FOLDER;
const script = path.join(folder, "mlp.lua"), uri = "file://" + script;
const text = `local m = require "mlua"
local A = m.axes { embed = 16, batch = 4, seq = 8, vocab = 256 }
local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)
function Model:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.table, "embed") end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.sgd { lr = 0.1 } }
`;

const settings = { command: process.env.MLUA, device: "rtx4090", mesh: "", settings: {}, read: [], inlayHints: true };
const events = {}, item = { show() { this.shown = true; }, hide() { this.shown = false; } };
const on = (name) => (body) => ((events[name] = body), { dispose() {} });
const vscode = {
  StatusBarAlignment: { Right: 2 },
  Uri: { parse: (value) => ({ toString: () => value }) },
  commands: { registerCommand: () => ({ dispose() {} }) },
  window: {
    activeTextEditor: { document: { uri: { toString: () => uri } } },
    createStatusBarItem: () => item,
    onDidChangeActiveTextEditor: on("editor"),
  },
  workspace: {
    isTrusted: false,
    onDidCloseTextDocument: on("close"),
    getConfiguration: () => ({ get: (key) => settings[key] }),
    onDidGrantWorkspaceTrust: on("trust"),
    onDidChangeConfiguration: on("configuration"),
  },
};

class LanguageClient {
  constructor(_id, _name, server, client) {
    this.server = server;
    this.client = client;
    this.handlers = {};
    this.waiting = {};
    this.count = 0;
    LanguageClient.last = this;
  }
  onNotification(method, body) { this.handlers[method] = body; }
  send(message) {
    const body = Buffer.from(JSON.stringify({ jsonrpc: "2.0", ...message }));
    this.process.stdin.write(`Content-Length: ${body.length}\r\n\r\n`);
    this.process.stdin.write(body);
  }
  request(method, params) {
    return new Promise((done) => {
      this.waiting[++this.count] = done;
      this.send({ id: this.count, method, params });
    });
  }
  sendNotification(method, params) { this.send({ method, params }); }
  async start() {
    this.process = spawn(this.server.command, this.server.args, { stdio: ["pipe", "pipe", "inherit"] });
    let data = Buffer.alloc(0);
    this.process.stdout.on("data", (part) => {
      data = Buffer.concat([data, part]);
      for (;;) {
        const end = data.indexOf("\r\n\r\n");
        const length = end < 0 ? 0 : Number(/Content-Length: (\d+)/.exec(data.subarray(0, end))[1]);
        if (end < 0 || data.length < end + 4 + length) return;
        const message = JSON.parse(data.subarray(end + 4, end + 4 + length));
        data = data.subarray(end + 4 + length);
        if (message.id && !message.method) this.waiting[message.id](message.result);
        else if (this.handlers[message.method]) this.handlers[message.method](message.params);
      }
    });
    await this.request("initialize", { rootUri: "file://" + folder, capabilities: {}, initializationOptions: this.client.initializationOptions });
    this.sendNotification("initialized", {});
  }
  async stop() {
    await this.request("shutdown");
    this.sendNotification("exit");
  }
}

const load = Module._load;
Module._load = (name, ...rest) => (name === "vscode" ? vscode : name === "vscode-languageclient/node" ? { LanguageClient } : load(name, ...rest));

async function main() {
  fs.writeFileSync(script, text);
  const extension = require(path.join(root, "editor/vscode/extension.js"));
  await extension.activate({ subscriptions: [] });
  const client = LanguageClient.last;
  client.sendNotification("textDocument/didOpen", { textDocument: { uri, languageId: "lua", version: 1, text } });
  await client.request("mlua/settled", {});
  console.log("not trusted:", item.text || "no status");
  vscode.workspace.isTrusted = true;
  events.trust();
  await client.request("mlua/settled", {});
  console.log("trusted:", item.text, item.shown);
  settings.device = "h100";
  events.configuration({ affectsConfiguration: (name) => name === "mlua" });
  await client.request("mlua/settled", {});
  console.log("device:", item.tooltip);
  const active = vscode.window.activeTextEditor;
  vscode.window.activeTextEditor = { document: { uri: { toString: () => "file:///other.lua" } } };
  events.editor();
  console.log("another editor:", item.shown);
  vscode.window.activeTextEditor = active;
  events.editor();
  console.log("back:", item.shown, item.text);
  events.close(active.document);
  events.editor();
  console.log("closed:", item.shown);
  const grammar = JSON.parse(fs.readFileSync(path.join(root, "editor/vscode/first-line.json")));
  const manifest = JSON.parse(fs.readFileSync(path.join(root, "editor/vscode/package.json")));
  console.log("grammar:", grammar.scopeName === manifest.contributes.grammars[0].scopeName);
  await extension.deactivate();
}

main();
