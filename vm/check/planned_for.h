/* What `mlua check` plans for: a device, and how much memory it has. */
#ifndef ML_CHECK_PLANNED_FOR_H
#define ML_CHECK_PLANNED_FOR_H

#include "runtime/plan/plan.h"
#include "vm/vm.h"

const char *planned_device(const ml_vm *vm);
/* Device memory of a run's process whose plans take so many bytes. */
int64_t planned_process(const ml_vm *vm, int64_t plans);
/* Whether the device has so many bytes for a process, whatever --memory says. */
bool planned_has(const ml_vm *vm, int64_t process);
/* Raises where the plan, with `extra` bytes of others, does not fit. */
void planned_require(lua_State *L, const ml_plan *plan, int64_t extra);

#endif
