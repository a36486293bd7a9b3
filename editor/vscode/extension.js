// mlua in VS Code: starts `mlua lsp` for workspaces with scripts of mlua, and shows the traced script in the status bar.
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client, item;
const statuses = new Map(); // what mlua/status said last, by the script's URI

// The server's options, from the settings and the workspace's trust.
function serverOptions() {
  const settings = vscode.workspace.getConfiguration("mlua");
  return {
    trusted: vscode.workspace.isTrusted === true,
    device: settings.get("device") || undefined,
    mesh: settings.get("mesh") || undefined,
    settings: settings.get("settings"),
    read: settings.get("read"),
    inlayHints: settings.get("inlayHints"),
  };
}

function scaled(value, base, units) {
  let unit = 0;
  while (value >= base && unit + 1 < units.length) {
    value /= base;
    unit++;
  }
  return (unit ? value.toFixed(1) : String(value)) + units[unit];
}

// "6.9 G parameters, 39.0 GiB, 615426 tokens/s" of a notice mlua/status.
function statusText(status) {
  const parts = [scaled(status.parameters, 1000, ["", " k", " M", " G", " T"]) + " parameters"];
  parts.push(scaled(status.peakBytes, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]));
  if (status.tokensPerSecond) parts.push(Math.round(status.tokensPerSecond) + " tokens/s");
  return (status.failed ? "$(error) " : "$(symbol-structure) ") + parts.join(", ");
}

// The item is about the script in the active editor: of one that no trace was about there is none.
function showStatus() {
  const editor = vscode.window.activeTextEditor;
  const status = editor && statuses.get(editor.document.uri.toString());
  if (!status) return item.hide();
  item.text = statusText(status);
  item.tooltip = "mlua, planned for " + status.device + (status.failed ? "; the script has an error since" : "");
  item.show();
}

function takeStatus(status) {
  statuses.set(vscode.Uri.parse(status.uri).toString(), status);
  showStatus();
}

async function start() {
  const command = vscode.workspace.getConfiguration("mlua").get("command") || "mlua";
  client = new LanguageClient(
    "mlua",
    "mlua",
    { command, args: ["lsp"] },
    { documentSelector: [{ scheme: "file", language: "lua" }], initializationOptions: serverOptions() }
  );
  client.onNotification("mlua/status", takeStatus);
  await client.start();
}

async function restart() {
  if (client) await client.stop();
  statuses.clear();
  showStatus();
  await start();
}

async function activate(context) {
  item = vscode.window.createStatusBarItem(vscode.StatusBarAlignment.Right, 50);
  const update = () => client && client.sendNotification("workspace/didChangeConfiguration", { settings: { mlua: serverOptions() } });
  context.subscriptions.push(
    item,
    vscode.commands.registerCommand("mlua.restart", restart),
    vscode.workspace.onDidGrantWorkspaceTrust(update),
    vscode.workspace.onDidChangeConfiguration((change) => change.affectsConfiguration("mlua") && (change.affectsConfiguration("mlua.command") ? restart() : update())),
    vscode.workspace.onDidCloseTextDocument((document) => statuses.delete(document.uri.toString())),
    vscode.window.onDidChangeActiveTextEditor(showStatus)
  );
  await start();
}

async function deactivate() {
  if (client) await client.stop();
}

module.exports = { activate, deactivate, statusText };
