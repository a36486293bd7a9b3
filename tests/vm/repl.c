/* Completion at the prompt. */
#include <string.h>

#include "tests/test.h"
#include "vm/repl/repl.h"

static vm_options options = {.mode = VM_REPL, .device = "cpu"};

static const char setup[] = "m = require 'mlua'\n"
                            "x = m.input('x', {m.axis('seq', 4), m.axis('embed', 8)})\n"
                            "p = m.param{m.axis('embed', 8)}\n"
                            "t = {first = {second = x, sector = 1}, fifth = 2}\n";

typedef struct {
    const char *text;
    char names[512];
    int part;
} completion;

static int complete(lua_State *L) {
    completion *c = lua_touserdata(L, 1);
    c->part = (int)repl_candidates(L, c->text, strlen(c->text));
    c->names[0] = 0;
    for (lua_Integer i = 1; i <= (lua_Integer)lua_rawlen(L, -1); i++) {
        lua_rawgeti(L, -1, i);
        size_t used = strlen(c->names);
        snprintf(c->names + used, sizeof c->names - used, "%s ", lua_tostring(L, -1));
        lua_pop(L, 1);
    }
    return 0;
}

static void expect(lua_State *L, const char *text, int part, const char *names) {
    completion c = {.text = text};
    lua_pushcfunction(L, complete);
    lua_pushlightuserdata(L, &c);
    CHECK(vm_call(L, 1, 0) == LUA_OK);
    CHECK_EQ_INT(c.part, part);
    CHECK_TEXT(c.names, names);
}

TEST(vm, repl_completion) {
    ml_vm *vm = NULL;
    CHECK_STATUS(vm_new(&options, &vm), ML_OK);
    lua_State *L = vm->L;
    CHECK(vm_load(L, setup, strlen(setup), "@setup", 0) == LUA_OK);
    CHECK(vm_call(L, 0, 0) == LUA_OK);
    expect(L, "m.soft", 4, "softmax softplus ");
    expect(L, "y = x:su", 2, "sub sum ");
    expect(L, "p:ass", 3, "assign ");
    expect(L, "p:slic", 4, "slice ");
    expect(L, "x:sum('s", 1, "seq ");
    expect(L, "x:sum(\"embed\", \"", 0, "embed seq ");
    expect(L, "t.fi", 2, "fifth first ");
    expect(L, "t.first.sec", 3, "second sector ");
    expect(L, "t.first.second:cums", 4, "cumsum ");
    expect(L, "t.nothing.at.all", 3, "");
    expect(L, "retu", 4, "return ");
    expect(L, "collectg", 8, "collectgarbage ");
    expect(L, "x.y.z.", 0, "");
    expect(L, ":", 0, "check help mem shard ");
    expect(L, ":sh", 2, "shard ");
    expect(L, ":mem x:su", 2, "sub sum ");
    expect(L, "= x:su", 2, "sub sum ");
    vm_free(vm);
}
