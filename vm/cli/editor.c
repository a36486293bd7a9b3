/* `mlua editor`: the definitions that stdlib/editor.lua makes, in a file. */
#include <errno.h>
#include <string.h>

#include "vm/vm.h"

int editor_write(ml_vm *vm, const char *path) {
    lua_State *L = vm->L;
    lua_getglobal(L, "require");
    lua_pushliteral(L, "mlua.editor");
    if (vm_call(L, 1, 1) != LUA_OK) {
        vm_print_error(L);
        return 1;
    }
    size_t size;
    const char *text = lua_tolstring(L, -1, &size);
    FILE *file = path ? fopen(path, "w") : stdout;
    bool failed = !file || fwrite(text, 1, size, file) != size || fflush(file) != 0;
    if (path && file && fclose(file) != 0) failed = true;
    if (failed)
        fprintf(stderr, "mlua: cannot write %s: %s\n", path ? path : "the definitions",
                strerror(errno));
    return failed;
}
