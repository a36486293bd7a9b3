/* The clients of editor/ with the real server. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/process/support.h"

static bool is_installed(process_room *room, const char *program) {
    int code;
    test_command(room->arena, ml_arena_format(room->arena, "command -v %s", program), &code);
    return code == 0;
}

/* What a command of the shell prints that runs an editor's side: MLUA, ROOT and FOLDER are set. */
static const char *run_client(process_room *room, const char *command) {
    int code;
    const char *binary = test_binary();
    char *here = realpath(".", NULL), *mlua = realpath(binary, NULL);
    char *output = test_command(
        room->arena,
        ml_arena_format(room->arena, "MLUA='%s' ROOT='%s' FOLDER='%s' timeout 100 %s 2>&1", mlua,
                        here, room->folder, command),
        &code);
    free(here); /* realpath's */
    free(mlua);
    CHECK_EQ_INT(code, 0);
    return output;
}

/* A script of tests/lua that draws edits, with EDITS of them (SEED), or as many as the environment
 * says. */
static void draw_edits(process_room *room, const char *script, const char *most) {
    const char *edits = getenv("EDITS") ? getenv("EDITS") : most;
    int code;
    char *output =
        test_command(room->arena,
                     ml_arena_format(room->arena, "EDITS=%s '%s' run %s --device cpu 2>&1", edits,
                                     test_binary(), script),
                     &code);
    EXPECT(code == 0, "%s", output);
}

/* Random edits of models in the server, in sessions of 100. */
static void random_edits(process_room *room) {
    draw_edits(room, "tests/lua/lsp_edits.lua", "10000");
}

TEST(long, lsp_random_edits) {
    process_in_room(random_edits);
}

/* Edits of a training script under mlua run --watch. */
static void watched_edits(process_room *room) {
    draw_edits(room, "tests/lua/run_watch_edits.lua", "50");
}

TEST(long, run_watch_edits) {
    process_in_room(watched_edits);
}

/* A script that does not end is stopped, and the server answers on. */
static void endless_script(process_room *room) {
    process_write(room, "endless.lua", "while true do end\n");
    process_result r =
        process_run(room, PROCESS_ANY_CODE, "", "check endless.lua --facts --confined .");
    CHECK_EQ_INT(r.code, 128 + SIGXCPU);
    CHECK(r.cpu_seconds < 6.5);
}

TEST(long, lsp_endless_script) {
    process_in_room(endless_script);
}

PROCESS_TEST(neovim_with_the_server) {
    if (!is_installed(room, "nvim")) test_skip("no nvim is installed (apt-get install neovim)");
    const char *output =
        run_client(room, "nvim --clean --headless -c 'luafile tests/lsp/nvim.lua' -c 'qa!'");
    CHECK_TEXT(output, "parameters 4096\n"
                       "hover x: bf16[batch=4, seq=8, embed=16]\n"
                       "lens parameters, 16.0 KiB\n"
                       "omnifunc v:lua.vim.lsp.omnifunc\n"
                       "completion true\n"
                       "renamed   return embedded:dot(self.table, \"embed\")\n"
                       "diagnostic 5:46-51 cannot gather along \"vocbb\": the table has no such "
                       "axis\n"
                       "mended 0\n");
}

PROCESS_TEST(vscode_extension_with_the_server) {
    if (!is_installed(room, "node")) test_skip("no node is installed (apt-get install nodejs)");
    const char *output = run_client(room, "node tests/lsp/vscode.js");
    CHECK(strstr(output, "not trusted: no status\n") != NULL);
    CHECK(strstr(output, "trusted: $(symbol-structure) 4.1 k parameters, 64.1 MiB true\n") != NULL);
    CHECK(strstr(output, "device: mlua, planned for NVIDIA H100") != NULL);
    CHECK(strstr(output, "another editor: false\n") != NULL);
    CHECK(strstr(output, "back: true $(symbol-structure) 4.1 k parameters, 64.1 MiB, ") != NULL);
    CHECK(strstr(output, "closed: false\n") != NULL);
    CHECK(strstr(output, "grammar: true\n") != NULL);
}

PROCESS_TEST(protocol_client_with_the_server) {
    if (!is_installed(room, "node")) test_skip("no node is installed (apt-get install nodejs)");
    if (access("editor/vscode/node_modules/vscode-languageserver-protocol", R_OK) != 0)
        test_skip("vscode-languageserver-protocol is not installed (npm install in editor/vscode)");
    CHECK_TEXT(run_client(room, "node tests/lsp/protocol.js"),
               "hover, completion, rename: true true true\n"
               "diagnostics: 0\n"
               "hover is markup: true true\n"
               "completion items: true\n"
               "diagnostic: true cannot gather along \"vocbb\": the table has no such axis\n"
               "exit 0\n");
}
