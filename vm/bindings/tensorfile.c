/* Tensor files: safetensors into Host arrays. */
#include "vm/vm.h"

#include "runtime/io/safetensors.h"

static const char *const FILE_CLASS = "mlua.safetensors";

static int file_gc(lua_State *L) {
    ml_safetensors **file = luaL_checkudata(L, 1, FILE_CLASS);
    ml_safetensors_close(*file);
    *file = NULL;
    return 0;
}

static int core_read_tensors(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    ml_comm *comm = vm_of(L)->options->comm;
    if (comm) ml_comm_busy(comm, "reading tensors from a file");
    ml_safetensors **file = lua_newuserdatauv(L, sizeof *file, 0);
    *file = NULL;
    luaL_setmetatable(L, FILE_CLASS);
    ml_status status = ml_safetensors_open(path, file);
    if (comm && status != ML_OK) ml_comm_done(comm);
    vm_check(L, status);
    lua_createtable(L, 0, (*file)->count);
    for (int i = 0; i < (*file)->count; i++) {
        const ml_safetensor *tensor = &(*file)->tensor[i];
        vm_host *host = vm_push_host(L, tensor->dtype, tensor->rank, tensor->shape);
        status = ml_safetensors_read(*file, tensor, host->data);
        if (comm && status != ML_OK) ml_comm_done(comm);
        vm_check(L, status);
        lua_setfield(L, -2, tensor->name);
    }
    ml_safetensors_close(*file);
    *file = NULL;
    if (comm) ml_comm_done(comm);
    return 1;
}

void vm_tensorfile_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"read_tensors", core_read_tensors, "path: string -> table<string, Host>",
         "The tensors of a safetensors file, by name, as host arrays of the file's dtypes and "
         "shapes; F16 becomes f32."},
        {0}};
    vm_register(L, functions);
    luaL_newmetatable(L, FILE_CLASS);
    vm_set_function(L, "__gc", file_gc);
    lua_pop(L, 1);
}
