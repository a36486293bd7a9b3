// The server beside the protocol's own client library (vscode-languageserver-protocol, which `npm install` in editor/vscode brings):
// initialization, diagnostics, hover, completion, symbols' places and the end, by its types and its connection.
// node tests/lsp/protocol.js with MLUA, ROOT and FOLDER set.
const { spawn } = require("child_process");
const path = require("path");
const { createRequire } = require("module");
const lsp = createRequire(path.join(process.env.ROOT, "editor/vscode/extension.js"))("vscode-languageserver-protocol/node");

const folder = process.env.FOLDER, uri = "file://" + path.join(folder, "client.lua");
const lines = [
  'local m = require "mlua"',
  "local A = m.axes { embed = 16, batch = 4, seq = 8, vocab = 256 }",
  'local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)',
  'function Model:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.table, "embed") end',
  "m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.sgd { lr = 0.1 } }",
  "",
];
const place = (line, text) => ({ textDocument: { uri }, position: { line, character: lines[line].indexOf(text) + 1 } });

async function main() {
  const server = spawn(process.env.MLUA, ["lsp"], { cwd: folder, stdio: ["pipe", "pipe", "inherit"] });
  const connection = lsp.createProtocolConnection(new lsp.StreamMessageReader(server.stdout), new lsp.StreamMessageWriter(server.stdin));
  connection.onError(([error]) => console.log("protocol error", error.message));
  let shown;
  const diagnostics = () => new Promise((done) => (shown = done));
  connection.onNotification(lsp.PublishDiagnosticsNotification.type, (p) => p.uri === uri && shown && shown(p));
  connection.listen();
  const { capabilities } = await connection.sendRequest(lsp.InitializeRequest.type, {
    processId: process.pid, rootUri: "file://" + folder, capabilities: {}, initializationOptions: { trusted: true, device: "cpu" },
  });
  console.log("hover, completion, rename:", !!capabilities.hoverProvider, !!capabilities.completionProvider, !!capabilities.renameProvider);
  await connection.sendNotification(lsp.InitializedNotification.type, {});
  let next = diagnostics();
  await connection.sendNotification(lsp.DidOpenTextDocumentNotification.type, { textDocument: { uri, languageId: "lua", version: 1, text: lines.join("\n") } });
  console.log("diagnostics:", (await next).diagnostics.length);
  const hover = await connection.sendRequest(lsp.HoverRequest.type, place(3, "self.table"));
  console.log("hover is markup:", lsp.MarkupContent.is(hover.contents), /vocab=256, embed=16/.test(hover.contents.value));
  const items = await connection.sendRequest(lsp.CompletionRequest.type, place(4, "m.train"));
  const list = Array.isArray(items) ? items : items.items;
  console.log("completion items:", list.length > 0 && list.every((item) => typeof item.label === "string"));
  next = diagnostics();
  await connection.sendNotification(lsp.DidChangeTextDocumentNotification.type, {
    textDocument: { uri, version: 2 }, contentChanges: [{ text: lines.join("\n").replace('"vocab")', '"vocbb")') }],
  });
  const [first] = (await next).diagnostics;
  console.log("diagnostic:", lsp.Diagnostic.is(first), first && first.message.split("\n")[0]);
  await connection.sendRequest(lsp.ShutdownRequest.type);
  await connection.sendNotification(lsp.ExitNotification.type);
  server.on("exit", (code) => { console.log("exit", code); process.exit(0); });
}
main();
