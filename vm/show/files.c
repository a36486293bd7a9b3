/* What stdlib/show.lua reads through C. */
#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/io/manifest.h"
#include "runtime/io/safetensors.h"
#include "runtime/io/tensor_hash.h"
#include "vm/embed.h"
#include "vm/show/show.h"
#include "vm/vm.h"

enum { BLOCK = 1 << 20 };

static int core_report_page(lua_State *L) {
    const ml_embedded *page = embed_find("report.html");
    lua_pushlstring(L, page->data, page->size);
    return 1;
}

static int core_folder(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    lua_newtable(L);
    DIR *folder = opendir(path);
    if (!folder) {
        luaL_pushfail(L);
        lua_pushfstring(L, "cannot open %s: %s", path, strerror(errno));
        return 2;
    }
    lua_Integer count = 0, bytes = 0;
    struct stat status;
    for (struct dirent *entry; (entry = readdir(folder));) {
        if (fstatat(dirfd(folder), entry->d_name, &status, 0) == 0 && S_ISREG(status.st_mode))
            bytes += status.st_size;
        if (entry->d_name[0] == '.') continue;
        lua_pushstring(L, entry->d_name);
        lua_rawseti(L, -2, ++count);
    }
    closedir(folder);
    lua_pushinteger(L, bytes);
    return 2;
}

static int core_read_metrics(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    json_t **run = vm_push_json(L);
    *run = json_object();
    vm_check(L, show_read_metrics(path, *run));
    vm_open_json(L);
    return 1;
}

/* ---- Tensors --------------------------------------------------------------------------------- */

/* What a call holds until its userdata is collected. */
typedef struct {
    ml_file file;
    ml_manifest *manifest;
    char *text;
} held;
static const char *const held_class = "mlua.show";

static int held_gc(lua_State *L) {
    held *h = luaL_checkudata(L, 1, held_class);
    ml_file_close(&h->file);
    ml_manifest_free(h->manifest);
    ml_free(h->text);
    *h = (held){0};
    return 0;
}

static held *hold(lua_State *L) {
    held *h = lua_newuserdatauv(L, sizeof *h, 0);
    *h = (held){0};
    luaL_setmetatable(L, held_class);
    return h;
}

static int core_tensor_header(lua_State *L) {
    int64_t length;
    const char *path = luaL_checkstring(L, 1);
    held *h = hold(L);
    vm_check(L, ml_file_open(path, &h->file));
    vm_check(L, ml_safetensors_header(&h->file, &h->text, &length));
    lua_pushlstring(L, h->text, (size_t)length);
    lua_pushinteger(L, h->file.bytes - 8 - length);
    return 2;
}

static ml_status verify_tensor(const ml_file *file, const ml_manifest_tensor *t, char *block) {
    const int width = ml_dtypes[t->dtype].bytes;
    uint64_t hash = 0;
    for (int64_t at = 0; at < t->bytes; at += BLOCK) {
        int64_t bytes = t->bytes - at < BLOCK ? t->bytes - at : BLOCK;
        ML_TRY(ml_file_read(file, t->offset + at, block, bytes));
        hash += ml_tensor_hash(block, width, at / width, bytes / width);
    }
    if (hash == t->hash) return ML_OK;
    return ml_fail(ML_IO, "%s is damaged: tensor \"%s\" is not the one that was written",
                   file->path, t->name);
}

/* Read every tensor. */
static ml_status verify(held *h, const char *folder) {
    char path[4096];
    h->text = ml_alloc(BLOCK);
    if (!h->text) return ml_fail(ML_NO_MEMORY, "out of memory to read %s", folder);
    for (int i = 0; i < h->manifest->file_count; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, h->manifest->files[i].name);
        ML_TRY(ml_file_open(path, &h->file));
        for (int k = 0; k < h->manifest->tensor_count; k++)
            if (h->manifest->tensors[k].file == i)
                ML_TRY(verify_tensor(&h->file, &h->manifest->tensors[k], h->text));
        ml_file_close(&h->file);
    }
    return ML_OK;
}

static void push_tensor(lua_State *L, const ml_manifest *m, const ml_manifest_tensor *t) {
    lua_createtable(L, 0, 5);
    vm_set_string(L, "name", t->name);
    vm_set_string(L, "dtype", ml_dtypes[t->dtype].name);
    vm_set_integer(L, "bytes", t->bytes);
    vm_set_string(L, "file", m->files[t->file].name);
    lua_createtable(L, t->rank, 0);
    for (int k = 0; k < t->rank; k++) {
        lua_createtable(L, 2, 0);
        lua_pushstring(L, t->axis[k]);
        lua_rawseti(L, -2, 1);
        lua_pushinteger(L, t->size[k]);
        lua_rawseti(L, -2, 2);
        lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "axes");
}

static int core_checkpoint_tensors(lua_State *L) {
    const char *folder = luaL_checkstring(L, 1);
    held *h = hold(L);
    if (ml_manifest_read(folder, &h->manifest) != ML_OK ||
        (lua_toboolean(L, 2) && verify(h, folder) != ML_OK)) {
        luaL_pushfail(L);
        lua_pushstring(L, ml_error_last()->text);
        return 2;
    }
    const ml_manifest *m = h->manifest;
    lua_createtable(L, m->tensor_count, 0);
    for (int i = 0; i < m->tensor_count; i++) {
        push_tensor(L, m, &m->tensors[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_pushstring(L, m->record);
    return 2;
}

void vm_show_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"report_page", core_report_page, "-> string", "the page of mlua show --html"},
        {"folder", core_folder, "path: string -> string[]?, integer|string",
         "the names in a folder that begin with no point, in any order, and the bytes of all its "
         "files; nil and the reason"},
        {"read_metrics", core_read_metrics, "path: string -> table",
         "what a metrics.jsonl says of its run"},
        {"tensor_header", core_tensor_header, "path: string -> string, integer",
         "the JSON before the tensors of a safetensors file, and how many bytes they have"},
        {"checkpoint_tensors", core_checkpoint_tensors,
         "path: string, verify?: boolean -> table[]?, string",
         "the tensors of a checkpoint, {name, dtype, axes, bytes, file}, and its record; nil and "
         "the problem. With `verify` every tensor is read"},
        {0}};
    static const vm_entry no_methods[] = {{0}};
    vm_register(L, functions);
    vm_new_class(L, held_class, no_methods, NULL, held_gc);
    lua_pop(L, 1);
}
