/* What is printed on standard output: JSON alone, no more than was asked for, the help of one
 * command. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

/* Prints in every way that a script has, before, while and after it trains. */
static const char talks[] =
    "local m = require 'mlua'\n"
    "print 'by print'\n"
    "local A = m.axes { batch = 4, seq = 8, embed = 8, vocab = 256 }\n"
    "local Model = m.module('Model', function(self) self.w = m.param { A.vocab, A.embed } end)\n"
    "function Model:forward(tokens)\n"
    "  return self.w:gather(tokens, 'vocab'):dot(self.w, 'embed')\n"
    "end\n"
    "local model = Model()\n"
    "local result = m.train { model = model, batch = A.batch, seq = A.seq, steps = 3,\n"
    "  eval_every = 2, on_step = function(step) io.write('by io.write ', step, '\\n') end }\n"
    "io.stdout:write(('loss %.3f\\n'):format(result.loss))\n"
    "os.execute 'echo by another process'\n"
    "m.generate(model, { prompt = 'a prompt', tokens = 2, seq = A.seq })\n";

/* How many lines there are, each of them a JSON object. */
static int json_lines(const char *text) {
    int count = 0;
    for (const char *line = text; *line;) {
        size_t length = strcspn(line, "\n");
        json_error_t error;
        json_t *object = json_loadb(line, length, 0, &error);
        EXPECT(json_is_object(object), "no JSON: %.*s", (int)length, line);
        json_decref(object);
        line += length + (line[length] != 0);
        count++;
    }
    return count;
}

PROCESS_TEST(json_alone) {
    process_write(room, "talks.lua", talks);
    process_result r =
        process_shell(room, 0, "\"$MLUA\" run --device cpu --json talks.lua 2>others");
    CHECK_EQ_INT(json_lines(r.output), 5); /* three steps, two evaluations */
    process_expect(&r, "\"step\":3,");
    process_expect(&r, "\"eval_loss\":");
    process_result others = process_shell(room, 0, "cat others");
    static const char *const reported[] = {"by print\n", "by io.write 3\n", "loss 5.", "a prompt",
                                           "by another process\n"};
    for (size_t i = 0; i < sizeof reported / sizeof *reported; i++)
        process_expect(&others, reported[i]);
    r = process_shell(room, 0, "\"$MLUA\" check --device h200 --json talks.lua 2>others");
    CHECK_EQ_INT(json_lines(r.output), 1);
    others = process_shell(room, 0, "cat others");
    CHECK_TEXT(others.output, "by print\nloss 0.000\nby another process\n");
    r = process_shell(room, 0,
                      "\"$MLUA\" run --device cpu -n 2 --mesh dp=2 --json \"$ROOT/models/gpt.lua\" "
                      "layers=1 embed=32 heads=2 seq=16 batch=4 steps=2 sample=4 2>others");
    CHECK_EQ_INT(json_lines(r.output), 2);
    r = process_shell(room, 1, "\"$MLUA\" run --device cpu --json talks.lua 2>&1 >/dev/full");
    process_expect(&r, "cannot write to standard output");
    r = process_shell(room, 1, "\"$MLUA\" check --device cpu --json talks.lua 2>&1 >/dev/full");
    process_expect(&r, "cannot write to standard output");
}

PROCESS_TEST(quiet) {
    process_write(room, "talks.lua", talks);
    process_result r = process_run(room, 0, "", "run --device cpu --quiet talks.lua");
    CHECK(!strstr(r.output, "step "));
    process_expect(&r, "by io.write 1\nby io.write 2\nby io.write 3\nloss 5.");
    r = process_run(room, 0, "", "run --device cpu --quiet --json talks.lua");
    process_expect(&r, "\"step\":3,");
    CHECK(!strstr(r.output, "first step after"));
}

PROCESS_TEST(help_describes_one_thing) {
    static const char *const commands[] = {"run", "check", "repl", "doctor", "editor"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        process_result help = process_run(room, 0, "", "help %s", commands[i]);
        CHECK(!strstr(help.output, "MLUA_"));
    }
    process_result r = process_run(room, 0, "", "help environment");
    process_expect(&r, "MLUA_CACHE=");
    CHECK(!strstr(r.output, "--"));
    r = process_run(room, 0, "", "help");
    process_expect(&r, "MLUA_CACHE=");
    process_expect(&r, "help [COMMAND|environment]");
    r = process_run(room, 2, "", "help chek");
    CHECK_TEXT(r.output, "mlua: there is no command \"chek\"\n  help: did you mean check?\n");
    r = process_run(room, 2, "", "help run check");
    CHECK_TEXT(r.output, "mlua: help takes one command\n");
}

/* A thousand rounds of a loop, and a program that is made after it. */
PROCESS_TEST(check_of_a_long_loop) {
    process_write(room, "loop.lua",
                  "local m = require 'mlua'\n"
                  "local x = m.host('f32', 4)\n"
                  "local function program(name, factor)\n"
                  "  return m.compile(function(i) return { y = (i.x * factor):sum() } end,\n"
                  "    { x = { m.axis('n', 4) } }, { name = name })\n"
                  "end\n"
                  "local step, other = program('step', 2), program('other', 3)\n"
                  "for i = 1, 1000 do\n"
                  "  print('y', step { x = x }.y, other { x = x }.y)\n"
                  "end\n"
                  "local co = coroutine.wrap(function() return program('late', 4) { x = x } end)\n"
                  "print(co().y)\n");
    process_result r = process_run(room, 0, "", "check --device h200 --types loop.lua");
    CHECK(!strstr(r.output, "y\t"));
    process_expect(&r, "tensors of late");
    CHECK(!strstr(r.output, "stopped"));
    process_write(room, "forever.lua",
                  "local m = require 'mlua'\n"
                  "local co = coroutine.wrap(function()\n"
                  "  for i = 1, 20000 do\n"
                  "    local f = m.compile(function(i) return i.x + 1 end, { x = {} })\n"
                  "    pcall(function() f { x = 1 } end)\n"
                  "  end\n"
                  "end)\n"
                  "for i = 1, 20000 do pcall(co) end\n"
                  "print 'never reached'\n");
    r = process_run(room, 0, "", "check --device h200 --json forever.lua");
    process_expect(&r, "\"ended\":{\"file\":\"forever.lua\",\"line\":5}");
    CHECK(r.seconds < 60);
}

/* os.exit ends the script of a check and of the prompt, and not what comes after it. */
PROCESS_TEST(exit_in_a_check) {
    process_write(
        room, "exit.lua",
        "local m = require 'mlua'\n"
        "local f = m.compile(function(i) return i.x + 1 end, { x = { m.axis('n', 3) } })\n"
        "local known = 'a local'\n"
        "pcall(function() os.exit(tonumber(os.getenv 'CODE')) end)\n"
        "error 'never reached'\n");
    process_result r = process_run(room, 0, "CODE=0", "check --device h200 exit.lua");
    process_expect(&r, "peak memory");
    CHECK(!strstr(r.output, "stopped"));
    r = process_run(room, 3, "CODE=3", "check --device h200 exit.lua");
    process_expect(&r, "peak memory");
    r = process_run(room, 3, "CODE=3", "run --device cpu exit.lua");
    CHECK_TEXT(r.output, "");
    r = process_shell(room, 0, "echo known | CODE=3 \"$MLUA\" repl --device cpu exit.lua");
    CHECK_TEXT(r.output, "\"a local\"\n");
}
