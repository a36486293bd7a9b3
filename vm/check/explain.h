/* mlua check --explain: how a program is compiled, pass by pass. */
#ifndef VM_EXPLAIN_H
#define VM_EXPLAIN_H

#include "vm/vm.h"

/* Plan the program as ml_session_plan does, and print how, where the command line asks for it. */
void explain_plan(lua_State *L, const ml_roots *roots, ml_plan **plan);
/* Plan a program that is not made, silently. */
void explain_plan_alone(lua_State *L, const ml_roots *roots, ml_plan **plan);

#endif
