/* Tensor files whose tensors are read in place: their headers, views of them into states, and files
 * that are written tensor by tensor (stdlib/hf_export.lua). */
#include "vm/vm.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/checkpoint/view_load.h"
#include "runtime/graph/convert.h"
#include "runtime/io/tensor_writer.h"

static const char *const open_class = "mlua.tensor_file";
static const char *const writer_class = "mlua.tensor_writer";

/* ---- Files that are open --------------------------------------------------------------------- */

static int core_tensor_file(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    ml_safetensors **file = lua_newuserdatauv(L, sizeof *file, 0);
    *file = NULL;
    luaL_setmetatable(L, open_class);
    vm_check(L, ml_safetensors_open(path, file));
    return 1;
}

static int file_gc(lua_State *L) {
    ml_safetensors **file = luaL_checkudata(L, 1, open_class);
    ml_safetensors_close(*file);
    *file = NULL;
    return 0;
}

static const char *dtype_name(const ml_safetensor *tensor) {
    return tensor->half ? "f16" : tensor->e4m3 ? "e4m3" : ml_dtypes[tensor->dtype].name;
}

static int file_tensors(lua_State *L) {
    const ml_safetensors *file = *(ml_safetensors **)luaL_checkudata(L, 1, open_class);
    lua_createtable(L, 0, file->count);
    for (int i = 0; i < file->count; i++) {
        const ml_safetensor *tensor = &file->tensor[i];
        lua_createtable(L, 0, 3);
        vm_set_string(L, "dtype", dtype_name(tensor));
        lua_createtable(L, tensor->rank, 0);
        for (int k = 0; k < tensor->rank; k++) {
            lua_pushinteger(L, tensor->shape[k]);
            lua_rawseti(L, -2, k + 1);
        }
        lua_setfield(L, -2, "shape");
        vm_set_integer(L, "place", i + 1);
        lua_setfield(L, -2, tensor->name);
    }
    return 1;
}

/* ---- Views ----------------------------------------------------------------------------------- */

static int64_t integer_field(lua_State *L, int table, const char *key) {
    lua_getfield(L, table, key);
    int64_t value = vm_integer(L, -1, key);
    lua_pop(L, 1);
    return value;
}

static void integers_field(lua_State *L, int table, const char *key, int count, int64_t *values) {
    lua_getfield(L, table, key);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, -1, i + 1);
        values[i] = vm_integer(L, -1, key);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/* The tensor of the fields `file` and `place`. */
static const ml_safetensor *tensor_field(lua_State *L, int table, const char *file_key,
                                         const char *place_key, const ml_safetensors **file) {
    lua_getfield(L, table, file_key);
    *file = *(ml_safetensors **)luaL_checkudata(L, -1, open_class);
    lua_pop(L, 1);
    int64_t place = integer_field(L, table, place_key);
    luaL_argcheck(L, place >= 1 && place <= (*file)->count, table, "a tensor's place");
    return &(*file)->tensor[place - 1];
}

static void read_box(lua_State *L, int table, int rank, ml_view *view) {
    view->offset = integer_field(L, table, "offset");
    integers_field(L, table, "stride", rank, view->stride);
    integers_field(L, table, "start", rank, view->start);
    integers_field(L, table, "count", rank, view->count);
}

/* The views of a state in the list at `list`; how many. */
static int read_views(lua_State *L, int list, uint32_t state, ml_view *views) {
    const int count = (int)vm_table_length(L, list);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, list, i + 1);
        const int table = lua_gettop(L);
        views[i].state = state;
        views[i].tensor = tensor_field(L, table, "file", "place", &views[i].file);
        if (vm_option(L, table, "scale_file")) {
            lua_pop(L, 1);
            views[i].scale =
                tensor_field(L, table, "scale_file", "scale_place", &views[i].scale_file);
        }
        read_box(L, table, ml_graph_state(vm_of(L)->graph, state)->type.rank, &views[i]);
        lua_settop(L, table - 1);
    }
    return count;
}

/* {{State, views}...}: all at once, so that threads have enough to read. */
static int core_load_views(lua_State *L) {
    ml_vm *vm = vm_of(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    const char *from = luaL_optstring(L, 2, "weights");
    const int loads = (int)vm_table_length(L, 1);
    int count = 0, at = 0;
    for (int i = 0; i < loads; i++) {
        lua_rawgeti(L, 1, i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        lua_rawgeti(L, -1, 2);
        luaL_checktype(L, -1, LUA_TTABLE);
        count += (int)vm_table_length(L, -1);
        lua_pop(L, 2);
    }
    ml_view *views = lua_newuserdatauv(L, sizeof *views * (size_t)(count + 1), 0);
    memset(views, 0, sizeof *views * (size_t)(count + 1));
    for (int i = 0; i < loads; i++) {
        lua_rawgeti(L, 1, i + 1);
        lua_rawgeti(L, -1, 1);
        const uint32_t id = vm_state(L, -1, "the state");
        lua_rawgeti(L, -2, 2);
        at += read_views(L, lua_gettop(L), id, views + at);
        lua_pop(L, 3);
    }
    if (vm->dry.runs) return 0;
    vm_start_device(L);
    ml_comm *comm = vm->options->comm;
    if (comm) ml_comm_busy(comm, "reading weights from files");
    ml_status status = ml_session_load_views(vm->session, views, count, from);
    if (comm) ml_comm_done(comm);
    vm_check(L, status);
    return 0;
}

/* Values of a Host, or of a state in its own memory. */
typedef struct {
    ml_dtype dtype;
    int rank;
    const int64_t *size;
    int64_t count;
    const void *data;
} values;

static values values_at(lua_State *L, int index) {
    uint32_t id;
    if (!vm_is_state(L, index, &id)) {
        const vm_host *host = luaL_checkudata(L, index, vm_host_class);
        return (values){host->dtype, host->rank, host->dims, host->count, host->data};
    }
    const ml_type *type = &ml_graph_state(vm_of(L)->graph, id)->type;
    values v = {(ml_dtype)type->dtype, type->rank, type->size, ml_type_elements(type), NULL};
    vm_check(L, ml_session_state_memory(vm_of(L)->session, id, &v.data));
    if (!v.data) vm_fail(L, "state:get() copies it", "the state is not in memory of this process");
    return v;
}

static int core_is_in_memory(lua_State *L) {
    const uint32_t id = vm_state(L, 1, "the state");
    const void *memory = NULL;
    if (!vm_of(L)->dry.runs) {
        vm_start_device(L);
        vm_check(L, ml_session_state_memory(vm_of(L)->session, id, &memory));
    }
    lua_pushboolean(L, memory != NULL);
    return 1;
}

/* paste(tensor: Host, values, view): values of a state into their places in a tensor. */
static int core_paste_view(lua_State *L) {
    vm_host *to = luaL_checkudata(L, 1, vm_host_class);
    const values from = values_at(L, 2);
    luaL_checktype(L, 3, LUA_TTABLE);
    ml_view view = {0};
    read_box(L, 3, from.rank, &view);
    int64_t last = view.offset, more;
    bool fits = view.offset >= 0 && to->dtype == from.dtype;
    for (int i = 0; i < from.rank && fits; i++)
        fits = view.start[i] >= 0 && view.count[i] > 0 && view.stride[i] >= 0 &&
               view.count[i] <= from.size[i] - view.start[i] &&
               !__builtin_mul_overflow(view.count[i] - 1, view.stride[i], &more) &&
               !__builtin_add_overflow(last, more, &last);
    if (!fits || last >= to->count) vm_fail(L, NULL, "the view is outside of the tensor");
    ml_view_paste(&view, from.rank, from.size, ml_dtypes[to->dtype].bytes, from.data, to->data);
    return 0;
}

/* ---- Files that are written ------------------------------------------------------------------ */

static int core_tensor_writer(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    size_t size;
    const char *header = luaL_checklstring(L, 2, &size);
    ml_tensor_writer **writer = lua_newuserdatauv(L, sizeof *writer, 1);
    *writer = NULL;
    luaL_setmetatable(L, writer_class);
    vm_check(L, ml_tensor_writer_new(path, header, size, writer));
    return 1;
}

static int writer_write(lua_State *L) {
    ml_tensor_writer **writer = luaL_checkudata(L, 1, writer_class);
    const values from = values_at(L, 2);
    const ml_dtype dtype = lua_isnoneornil(L, 3) ? from.dtype : vm_dtype(L, 3, -1);
    const int64_t count = luaL_optinteger(L, 4, from.count);
    if (!*writer) vm_fail(L, NULL, "the file is closed");
    luaL_argcheck(L, count >= 0 && count <= from.count, 4, "not in the values");
    if (!ml_converts(from.dtype, dtype))
        vm_fail(L, NULL, "%s does not become %s", ml_dtypes[from.dtype].name,
                ml_dtypes[dtype].name);
    vm_check(L, ml_tensor_writer_add(*writer, from.dtype, from.data, count, dtype));
    lua_settop(L, 2); /* the values stay until they are written */
    lua_setiuservalue(L, 1, 1);
    return 0;
}

static int writer_close(lua_State *L) {
    ml_tensor_writer **writer = luaL_checkudata(L, 1, writer_class), *open = *writer;
    *writer = NULL;
    vm_check(L, ml_tensor_writer_close(open));
    return 0;
}

static int writer_gc(lua_State *L) {
    ml_tensor_writer **writer = luaL_checkudata(L, 1, writer_class);
    ml_tensor_writer_close(*writer);
    *writer = NULL;
    return 0;
}

/* A new folder for what is written; one that holds something is refused. */
static int core_make_folder(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    if (mkdir(path, 0777) == 0) return 0;
    if (errno != EEXIST) vm_fail(L, NULL, "cannot make the folder %s: %s", path, strerror(errno));
    DIR *folder = opendir(path);
    if (!folder) vm_fail(L, NULL, "cannot open the folder %s: %s", path, strerror(errno));
    int others = 0;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        others += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(folder);
    if (others > 0)
        vm_fail(L, "name a new folder, or empty this one", "%s holds files already", path);
    return 0;
}

void vm_views_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"tensor_file", core_tensor_file, "path: string -> TensorFile",
         "a safetensors file whose tensors are read in place; :tensors() gives {name = {dtype, "
         "shape, place}}"},
        {"load_views", core_load_views, "loads: table[], from?: string",
         "set states {{State, views}...} from views {file, place, offset, stride, start, count} of "
         "tensors: each says where the elements of a box of the state lie, in elements of the "
         "tensor; `from` is what messages call their source"},
        {"is_in_memory", core_is_in_memory, "state: State -> boolean",
         "whether paste_view and TensorWriter:write take the state itself: all of it is in memory "
         "of this process"},
        {"paste_view", core_paste_view, "tensor: Host, values: Host|State, view: table",
         "put a state's values where a view says that they lie in the tensor"},
        {"tensor_writer", core_tensor_writer, "path: string, header: string -> TensorWriter",
         "begin a safetensors file: :write(Host, dtype?) adds the tensors in the header's order, "
         "cast "
         "and written while the next one is made; :close()"},
        {"make_folder", core_make_folder, "path: string", "a new folder, or one that is empty"},
        {0}};
    static const vm_entry file_methods[] = {
        {"tensors", file_tensors, "-> table", "the tensors by name"}, {0}};
    static const vm_entry writer_methods[] = {
        {"write", writer_write, "values: Host|State, dtype?: string, count?: integer",
         "the next tensor, of all values or the first `count`, which may not change until the next "
         "call"},
        {"close", writer_close, "", "the file is whole"},
        {0}};
    vm_register(L, functions);
    vm_new_class(L, open_class, file_methods, NULL, file_gc);
    lua_pop(L, 1);
    vm_new_class(L, writer_class, writer_methods, NULL, writer_gc);
    lua_pop(L, 1);
}
