/* Methods of programs that read their plans; what they take and give is said where they are listed
 * (program.c). */
#ifndef VM_PROGRAM_PLAN_H
#define VM_PROGRAM_PLAN_H

#include "vm/vm.h"

int program_plan(lua_State *L);
int program_cost(lua_State *L);
int program_room(lua_State *L);

#endif
