/* What a program that cannot be planned leaves to the programs that follow: nothing. */
#include <string.h>

#include "runtime/exec/session.h"
#include "tests/test.h"
#include "vm/vm.h"

/* The tensors have more than 2^60 bytes, which planning finds. */
static const char SCRIPT[] =
    "local m = require 'mlua'\n"
    "local large = { m.axis('a', 1 << 19), m.axis('b', 1 << 19), m.axis('c', 1 << 19) }\n"
    "local function too_large() return m.uniform(large) + m.uniform(large) end\n"
    "local micro = m.compile(function() return m.ones { large[1] } end)\n"
    "local made, text = pcall(m.compile, too_large, {},\n"
    "                         { applies = { micro }, group = 2, plan_only = ... })\n"
    "assert(not made, 'planned')\n"
    "assert(tostring(text):find('2^60 bytes', 1, true), text)\n";

static void check_plan(vm_mode mode, bool plan_only) {
    const vm_options options = {.mode = mode, .device = "cpu", .quiet = true};
    ml_vm *vm = NULL;
    CHECK_STATUS(vm_new(&options, &vm), ML_OK);
    lua_State *L = vm->L;
    vm->dry.runs = mode == VM_CHECK;
    REQUIRE(vm_load(L, SCRIPT, strlen(SCRIPT), "@script", 0) == LUA_OK);
    lua_pushboolean(L, plan_only);
    if (vm_call(L, 1, 0) != LUA_OK) {
        CHECK(false);
        vm_print_error(L);
    }
    CHECK_EQ_INT(vm->session->applied.count, 0);
    CHECK_EQ_INT(vm->session->group_size, 0);
    vm_free(vm);
}

TEST(vm, failed_plans_leave_no_group) {
    check_plan(VM_RUN, false);
    check_plan(VM_RUN, true);
    check_plan(VM_CHECK, false);
    check_plan(VM_CHECK, true);
}
