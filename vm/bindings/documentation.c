/* What stdlib/documentation.lua describes functions by: the rows of bindings, methods of classes,
 * and the texts of stdlib/. */
#include <string.h>

#include "vm/embed.h"
#include "vm/vm.h"

static int core_documentation(lua_State *L) {
    luaL_checkany(L, 1);
    const vm_entry *row = vm_documentation(L, 1);
    if (!row) return 0;
    lua_pushstring(L, row->signature);
    lua_pushstring(L, row->doc);
    lua_pushstring(L, row->name);
    return 3;
}

static int core_class_methods(lua_State *L) {
    luaL_getmetatable(L, luaL_checkstring(L, 1));
    lua_getfield(L, -1, "__index");
    if (lua_iscfunction(L, -1)) lua_getupvalue(L, -1, 1);
    return 1;
}

static int core_library_texts(lua_State *L) {
    lua_Integer count = 0;
    lua_newtable(L);
    for (const ml_embedded *file = ml_embedded_files; file->name; file++) {
        size_t length = strlen(file->name);
        if (length < 4 || strcmp(file->name + length - 4, ".lua") != 0) continue;
        lua_pushlstring(L, file->data, file->size);
        lua_rawseti(L, -2, ++count);
    }
    return 1;
}

static const vm_entry functions[] = {
    {"documentation", core_documentation, "of: any -> string?, string, string",
     "of a function of C its signature, text and name"},
    {"class_methods", core_class_methods, "class: string -> table",
     "the methods of host, program and other classes of C"},
    {"library_texts", core_library_texts, "-> string[]", "the files of stdlib/"},
    {0}};

void vm_documentation_register(lua_State *L) {
    vm_register(L, functions);
}
