/* Services of the host for stdlib: options, device, time, terminal, texts. */
#include "vm/vm.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/crash.h"
#include "runtime/base/process.h"
#include "vm/check/dry.h"
#include "vm/cli/gpus.h"

static const char *const options_key = "mlua.options";

/* ---- Options --------------------------------------------------------------------------------- */

static void push_settings(lua_State *L, const vm_options *o) {
    lua_newtable(L);
    for (int i = 0; i < o->override_count; i++) {
        lua_createtable(L, 2, 0);
        lua_pushstring(L, o->overrides[i].key);
        lua_rawseti(L, -2, 1);
        lua_pushstring(L, o->overrides[i].text);
        lua_rawseti(L, -2, 2);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "overrides");
    lua_newtable(L);
    for (int i = 0; i < o->mesh_count; i++)
        vm_set_integer(L, o->mesh[i].key, strtoll(o->mesh[i].text, NULL, 10));
    lua_setfield(L, -2, "mesh");
    lua_newtable(L);
    for (int i = 0; i < o->layout_count; i++) vm_set_string(L, o->layout[i].key, o->layout[i].text);
    lua_setfield(L, -2, "layout");
}

/* How generate continues prompts; numbers that are 0 were not given. */
static void push_answers(lua_State *L, const vm_options *o) {
    vm_set_number(L, "min_p", o->min_p);
    vm_set_number(L, "repetition_penalty", o->repetition_penalty);
    vm_set_number(L, "presence_penalty", o->presence_penalty);
    vm_set_number(L, "frequency_penalty", o->frequency_penalty);
    vm_set_integer(L, "samples", o->samples);
    vm_set_integer(L, "logprobs", o->logprobs);
    vm_set_integer(L, "rows", o->rows);
    vm_set_string(L, "prompts", o->prompts);
    vm_set_string(L, "system", o->system);
    vm_set_string(L, "score", o->score);
    vm_set_string(L, "weights", o->weights);
    vm_set_boolean(L, "chat", o->chat);
    vm_set_boolean(L, "batch_invariant", o->batch_invariant);
    if (o->seed_given) vm_set_integer(L, "draw_seed", o->seed);
    lua_createtable(L, o->stop_count, 0);
    for (int i = 0; i < o->stop_count; i++) {
        lua_pushstring(L, o->stops[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "stops");
}

/* "dp=2,tp=4", as one types it. */
static void push_joined(lua_State *L, const char *field, const vm_setting *list, int count) {
    if (count == 0) return;
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    for (int i = 0; i < count; i++) {
        lua_pushfstring(L, "%s%s=%s", i ? "," : "", list[i].key, list[i].text);
        luaL_addvalue(&text);
    }
    luaL_pushresult(&text);
    lua_setfield(L, -2, field);
}

static void push_tune(lua_State *L, const vm_options *o) {
    vm_set_integer(L, "gpus", o->gpus);
    vm_set_integer(L, "hosts", o->hosts);
    vm_set_integer(L, "global_batch", o->global_batch);
    vm_set_integer(L, "tries", o->tries);
    vm_set_integer(L, "within", o->within);
    vm_set_number(L, "memory", o->memory);
    vm_set_boolean(L, "measure", o->measure);
    vm_set_string(L, "precision", o->precision);
    vm_set_string(L, "results", o->results);
    vm_set_boolean(L, "every", o->every);
    vm_set_boolean(L, "serve", o->serve);
    vm_set_number(L, "latency", o->latency);
    vm_set_number(L, "first", o->first);
    vm_set_integer(L, "prompt_tokens", o->prompt_tokens);
    vm_set_integer(L, "processors", sysconf(_SC_NPROCESSORS_ONLN));
    push_joined(L, "mesh_text", o->mesh, o->mesh_count);
    push_joined(L, "layout_text", o->layout, o->layout_count);
    vm_set_string(L, "device_name", o->device);
    vm_set_string(L, "dtype_name",
                  o->fp8          ? "fp8"
                  : o->dtype >= 0 ? ml_dtypes[o->dtype].name
                                  : NULL);
}

static void push_serve(lua_State *L, const vm_options *o) {
    enum { SLOTS = 32 };
    vm_set_string(L, "host", o->host);
    vm_set_integer(L, "port", o->port);
    vm_set_string(L, "token_file", o->token_file);
    vm_set_integer(L, "slots", o->slots ? o->slots : SLOTS);
    vm_set_integer(L, "chunk", o->chunk);
    vm_set_integer(L, "queue", o->queue);
    vm_set_integer(L, "seconds", o->seconds);
}

/* --from, and what generate and export do with it. */
static void push_task(lua_State *L, const vm_options *o) {
    vm_set_string(L, "from", o->from);
    vm_set_string(L, "task", o->task);
    vm_set_string(L, "prompt", o->prompt);
    vm_set_string(L, "ids", o->ids);
    vm_set_integer(L, "tokens", o->tokens);
    vm_set_integer(L, "top_k", o->top_k);
    vm_set_number(L, "temperature", o->temperature);
    vm_set_number(L, "top_p", o->top_p);
    push_answers(L, o);
    push_serve(L, o);
    push_tune(L, o);
    vm_set_string(L, "export_to", o->out);
    vm_set_string(L, "file_dtype", o->file_dtype);
    vm_set_boolean(L, "hf", o->hf);
    vm_set_string(L, "adapter", o->adapter);
    vm_set_boolean(L, "adapter_alone", o->adapter_alone);
}

static void push_show(lua_State *L, const vm_options *o) {
    vm_set_boolean(L, "ascii", o->ascii);
    vm_set_boolean(L, "verify", o->verify);
    vm_set_string(L, "html", o->html);
    lua_createtable(L, o->path_count, 0);
    for (int i = 0; i < o->path_count; i++) {
        lua_pushstring(L, o->paths[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "paths");
}

/* --out of a run, and how it continues. */
static void push_run(lua_State *L, const vm_options *o) {
    vm_set_string(L, "out", o->run_folder);
    vm_set_boolean(L, "resume", o->resume);
    vm_set_boolean(L, "new_data", o->new_data);
    vm_set_boolean(L, "new_sizes", o->new_sizes);
    if (o->undo_memory > 0) vm_set_number(L, "undo_memory", o->undo_memory);
    const char *second = o->undo ? strchr(o->undo, ':') : NULL;
    if (second) {
        lua_createtable(L, 2, 0);
        lua_pushlstring(L, o->undo, (size_t)(second - o->undo));
        lua_rawseti(L, -2, 1);
        lua_pushstring(L, second + 1);
        lua_rawseti(L, -2, 2);
        lua_setfield(L, -2, "undo");
    }
    vm_set_string(L, "command", o->command);
    vm_set_string(L, "version", MLUA_VERSION);
}

static void make_options(lua_State *L) {
    static const char *const modes[] = {"run", "check", "repl"};
    const vm_options *o = vm_of(L)->options;
    lua_newtable(L);
    vm_set_string(L, "mode", modes[o->mode]);
    vm_set_string(L, "device", o->device);
    vm_set_boolean(L, "json", o->json);
    vm_set_boolean(L, "quiet", o->quiet);
    vm_set_boolean(L, "profile", o->profile != NULL);
    vm_set_string(L, "script", o->script);
    vm_set_integer(L, "seed", o->seed);
    vm_set_integer(L, "rank", o->comm ? ml_comm_rank(o->comm) : 0);
    vm_set_integer(L, "ranks", o->comm ? ml_comm_world(o->comm) : 1);
    vm_set_integer(L, "run", o->run);
    push_task(L, o);
    push_run(L, o);
    push_show(L, o);
    push_settings(L, o);
    lua_setfield(L, LUA_REGISTRYINDEX, options_key);
}

static int core_options(lua_State *L) {
    lua_getfield(L, LUA_REGISTRYINDEX, options_key);
    return 1;
}

static int core_set_seed(lua_State *L) {
    int64_t seed = vm_integer(L, 1, "the seed");
    ml_session_set_seed(vm_of(L)->session, seed);
    lua_getfield(L, LUA_REGISTRYINDEX, options_key);
    vm_set_integer(L, "seed", seed);
    vm_seed_random(L);
    return 0;
}

/* ---- Device ---------------------------------------------------------------------------------- */

/* --memory, and --nodes: of which the ranks that --mesh makes are. Of a GPU plans have what a run's
 * process leaves. */
static void set_options(ml_vm *vm, bool gpu) {
    const vm_options *o = vm->options;
    ml_target *target = &vm->check_target;
    int64_t ranks = 1;
    for (int i = 0; i < o->mesh_count; i++) ranks *= strtoll(o->mesh[i].text, NULL, 10);
    if (o->memory > 0) target->memory_bytes = (int64_t)(o->memory * (1 << 30));
    if (gpu) target->memory_bytes = ml_plan_bytes(target->memory_bytes, ranks > 1);
    vm->check_ranks = gpu ? ranks : 0;
    if (o->hosts > 0) target->host_ranks = (int)((ranks - 1) / o->hosts + 1);
}

/* What `mlua check` and the prompt plan for: the named device, else the machine's GPU, else its
 * CPU. */
static void choose_target(lua_State *L) {
    ml_vm *vm = vm_of(L);
    if (vm->check_device) return;
    const char *name = vm->options->device;
    const ml_gpu *gpu = name ? gpu_by_key(name) : NULL;
    if (!gpu && (name ? strcmp(name, "cuda") == 0 : gpu_is_present())) {
        gpu = gpu_of_machine();
        if (!gpu) gpu = gpu_at(0);
    }
    if (gpu) {
        gpu_target(gpu, &vm->check_target);
        lua_pushfstring(L, "NVIDIA %s, %d GiB", gpu->model, (int)(gpu->memory_gib + 0.5));
    } else {
        vm_check(L, ml_session_open(vm->session, name ? name : "cpu", 0));
        ml_device *device = ml_session_device(vm->session);
        vm->check_target = device->target;
        lua_pushstring(L, device->description);
    }
    ml_target_set_options(&vm->check_target);
    set_options(vm, gpu != NULL);
    vm->check_device = vm_intern(L, lua_tostring(L, -1));
    lua_pop(L, 1);
}

void vm_open_device(lua_State *L) {
    if (vm_of(L)->options->mode == VM_RUN)
        vm_start_device(L);
    else
        choose_target(L);
}

bool vm_cannot_run(const ml_vm *vm) {
    const char *name = vm->options->device;
    const ml_layout *layout = ml_session_layout(vm->session);
    if (vm->options->mode != VM_REPL) return false;
    return (name && gpu_by_key(name)) || (layout && ml_layout_ranks(layout) > 1);
}

void vm_start_device(lua_State *L) {
    ml_vm *vm = vm_of(L);
    const char *name = vm->options->device;
    const ml_layout *layout = ml_session_layout(vm->session);
    if (vm_cannot_run(vm) && layout && ml_layout_ranks(layout) > 1)
        vm_fail(L, "= x computes small tensors; mlua run -n RANKS runs scripts",
                "the prompt is one process, and the layout has %lld ranks: it only plans",
                (long long)ml_layout_ranks(layout));
    if (ml_session_device(vm->session)) return;
    if (name && gpu_by_key(name))
        vm_fail(L, "--device cuda or cpu runs programs; = x computes small tensors",
                "the prompt plans for %s (--device %s), and runs nothing", gpu_by_key(name)->model,
                name);
    vm_check(L, ml_session_open(vm->session, name, 0));
    vm_profile_attach(L);
}

const ml_target *vm_target(lua_State *L) {
    ml_vm *vm = vm_of(L);
    vm_open_device(L);
    return vm->check_device ? &vm->check_target : &ml_session_device(vm->session)->target;
}

ml_dtype vm_compute_dtype(lua_State *L) {
    ml_vm *vm = vm_of(L);
    if (vm->compute_dtype < 0) {
        vm->compute_dtype = vm_target(L)->kind == ML_TARGET_CUDA ? ML_BF16 : ML_F32;
    }
    return (ml_dtype)vm->compute_dtype;
}

static int core_compute_dtype(lua_State *L) {
    if (!lua_isnoneornil(L, 1)) {
        const char *name = lua_tostring(L, 1);
        const bool fp8 = name != NULL && strcmp(name, "fp8") == 0;
        ml_dtype dtype = fp8 ? ML_BF16 : vm_dtype(L, 1, -1);
        if (ml_dtypes[dtype].kind != ML_KIND_FLOAT || ml_dtypes[dtype].bytes == 1)
            vm_fail(L, "bf16, fp8, f16, f32 or f64", "the compute dtype must be a float, not %s",
                    ml_dtypes[dtype].name);
        vm_of(L)->compute_dtype = dtype;
        vm_of(L)->fp8 = fp8;
    }
    lua_pushstring(L, ml_dtypes[vm_compute_dtype(L)].name);
    return 1;
}

static int core_device(lua_State *L) {
    ml_vm *vm = vm_of(L);
    vm_open_device(L);
    const ml_device *device = ml_session_device(vm->session);
    const ml_target *target = device ? &device->target : &vm->check_target;
    const char *description = device ? device->description : vm->check_device;
    const ml_gpu *gpu = target->kind == ML_TARGET_CUDA ? gpu_by_model(description) : NULL;
    lua_newtable(L);
    vm_set_string(L, "name", device ? device->ops->name : "cuda");
    vm_set_string(L, "description", description);
    vm_set_integer(L, "memory_bytes", target->memory_bytes);
    vm_set_integer(L, "used_bytes", device ? device->current_bytes : 0);
    vm_set_integer(L, "peak_bytes", device ? device->peak_bytes : 0);
    vm_set_number(L, "peak_flops", gpu ? gpu->tflops * 1e12 : 0);
    if (device && vm->options->profile) {
        vm_check(L, device->ops->wait(ml_session_device(vm->session)));
        vm_set_number(L, "busy_seconds", device->profile->busy);
    }
    return 1;
}

/* ---- The end of the process ------------------------------------------------------------------ */

void vm_exit(int code) {
    ml_crash_ending();
    fflush(NULL);
    ml_process_clean();
    _exit(code);
}

/* os.exit: Lua's own would run the destructors of libraries whose threads go on. What the end of a
 * script does is finished first: a check's report, the profile. Other ranks are notified that this
 * one is done; a rank that failed is reported as one that died. */
static int lua_exit(lua_State *L) {
    int code = EXIT_SUCCESS;
    if (lua_isboolean(L, 1))
        code = lua_toboolean(L, 1) ? EXIT_SUCCESS : EXIT_FAILURE;
    else
        code = (int)luaL_optinteger(L, 1, EXIT_SUCCESS);
    if (vm_of(L)->dry.runs) dry_exit(L, code);
    vm_profile_finish(L);
    code = vm_end_code(L, code);
    fflush(NULL);
    if (code == EXIT_SUCCESS || code == ML_EXIT_UNSAVED) ml_comm_close(vm_of(L)->options->comm);
    vm_exit(code);
}

/* ---- Texts and time -------------------------------------------------------------------------- */

static int core_hash(lua_State *L) {
    size_t length;
    const char *text = luaL_checklstring(L, 1, &length);
    lua_pushinteger(L, (lua_Integer)ml_hash(text, length, 0));
    return 1;
}

/* Once a row of each step. */
static int core_draw_key(lua_State *L) {
    char text[64];
    int size = snprintf(text, sizeof text, "%lld sample %lld", (long long)luaL_checkinteger(L, 1),
                        (long long)luaL_checkinteger(L, 2));
    lua_pushinteger(L, (lua_Integer)ml_hash(text, (size_t)size, 0));
    return 1;
}

static int core_time(lua_State *L) {
    lua_pushnumber(L, ml_clock_now());
    return 1;
}

/* Ranks that see a signal between different steps stop together; so do those of which some saw
 * none. The number of the highest signal, and below it whether something is due. */
static int core_stopped(lua_State *L) {
    vm_of(L)->polls_stop = true;
    int64_t agreed = 2 * (int64_t)(vm_stop ? vm_stop_signal : 0) + lua_toboolean(L, 1);
    vm_check(L, ml_session_step(vm_of(L)->session, &agreed));
    if (agreed > 1 && !vm_stop) vm_stop_signal = (int)(agreed >> 1), vm_stop = 1;
    lua_pushboolean(L, agreed > 1);
    lua_pushboolean(L, agreed & 1);
    return 2;
}

static int core_terminal(lua_State *L) {
    struct winsize size;
    if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
    lua_pushinteger(L, size.ws_col ? size.ws_col : 80);
    return 1;
}

static int write_to(lua_State *L, FILE *file) {
    size_t length;
    const char *text = luaL_tolstring(L, 1, &length);
    bool failed = fwrite(text, 1, length, file) != length || fflush(file) != 0;
    if (failed && file != stderr) vm_fail(L, NULL, "cannot write to standard output");
    return 0;
}

static int core_write(lua_State *L) {
    return write_to(L, stdout);
}

static int core_write_json(lua_State *L) {
    FILE *out = vm_of(L)->options->json_out; /* of a run */
    return write_to(L, out ? out : stdout);
}

static int core_write_error(lua_State *L) {
    size_t size;
    const char *text = luaL_tolstring(L, 1, &size);
    vm_log(L, text, size);
    return write_to(L, stderr);
}

static int core_suggest(lua_State *L) {
    luaL_checkstring(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    vm_push_suggestion(L, lua_tostring(L, 1), 2);
    return 1;
}

static int core_module_path(lua_State *L) {
    ml_vm *vm = vm_of(L);
    const char *old = vm->module;
    vm->module = lua_isnoneornil(L, 1) ? "" : vm_intern(L, luaL_checkstring(L, 1));
    lua_pushstring(L, old);
    return 1;
}

static const char *const here_class = "mlua.here";

static int leave_here(lua_State *L) {
    vm_of(L)->here = *(const vm_here *)lua_touserdata(L, 1);
    return 0;
}

/* Every op asks for its line: it is looked for once below this call, where it cannot change. */
static int call_from_here(lua_State *L, bool alone) {
    ml_vm *vm = vm_of(L);
    int arguments = lua_gettop(L) - 1;
    luaL_checkany(L, 1);
    ml_origin origin;
    vm_origin(L, &origin);
    *(vm_here *)lua_newuserdatauv(L, sizeof vm->here, 0) = vm->here;
    luaL_setmetatable(L, here_class);
    lua_insert(L, 1);
    lua_toclose(L, 1); /* errors leave, too */
    lua_Debug frame;
    lua_getstack(L, 0, &frame);
    vm->here = (vm_here){frame.i_ci, origin.file, origin.line, alone || vm->here.alone};
    lua_call(L, arguments, LUA_MULTRET);
    return lua_gettop(L) - 1;
}

static int core_from_here(lua_State *L) {
    return call_from_here(L, false);
}

static int core_alone(lua_State *L) {
    return call_from_here(L, true);
}

/* Errors then say "mlua:" in place of the script's line. An error that leaves it ends the script.
 */
static int core_for_command(lua_State *L) {
    ml_vm *vm = vm_of(L);
    lua_Debug frame;
    luaL_checkany(L, 1);
    lua_getstack(L, 0, &frame);
    vm->command = frame.i_ci;
    lua_call(L, lua_gettop(L) - 1, 0);
    vm->command = NULL;
    return 0;
}

static int core_is_tensor(lua_State *L) {
    lua_pushboolean(L, vm_is_tensor(L, 1));
    return 1;
}

static const vm_entry functions[] = {
    {"options", core_options, "-> table",
     "the command line: mode, device, json, mesh, seed, overrides, script, quiet, profile; rank "
     "and "
     "ranks"},
    {"compute_dtype", core_compute_dtype, "dtype?: string -> string",
     "the dtype in which forward functions read parameters and products run; sets it where one is "
     "given"},
    {"device", core_device, "-> table",
     "name, description, memory_bytes, used_bytes, peak_bytes, peak_flops (dense bf16; 0: "
     "unknown); with --profile busy_seconds, in which it worked so far"},
    {"set_seed", core_set_seed, "seed: integer", "the seed of all randomness"},
    {"hash", core_hash, "text: string -> integer", "a 64-bit hash of a text, the same everywhere"},
    {"draw_key", core_draw_key, "seed: integer, number: integer -> integer",
     "the key of the draw of token `number` of a seed's answer"},
    {"time", core_time, "-> number", "seconds, from an arbitrary start"},
    {"stopped", core_stopped, "due?: boolean -> boolean, boolean",
     "whether a signal asked to stop any rank, and whether something is due on any; all ranks ask "
     "at once"},
    {"terminal", core_terminal, "-> integer?",
     "the columns of the terminal, where standard output is one"},
    {"write", core_write, "text: any", "write to standard output at once"},
    {"write_json", core_write_json, "text: any", "write to where --json's objects go at once"},
    {"write_error", core_write_error, "text: any", "write to standard error at once"},
    {"suggest", core_suggest, "word: string, words: string[] -> string?",
     "the known word that was probably meant"},
    {"module_path", core_module_path, "path?: string -> string",
     "set the module path that new nodes carry; gives the old one"},
    {"from_here", core_from_here, "fn: function, ...: any -> any",
     "call fn(...): what no function of the script makes in it comes from the line that runs now"},
    {"alone", core_alone, "fn: function, ...: any -> any",
     "call fn(...), in which no function of the script runs: all that it makes comes from the line "
     "that runs now"},
    {"for_command", core_for_command, "fn: function, ...: any",
     "call fn(...) for the command line: its errors name no line of the script but those of what "
     "the script's functions do in it"},
    {"is_tensor", core_is_tensor, "value: any -> boolean",
     "whether a value is a tensor or a state"},
    {0}};

void vm_service_register(lua_State *L) {
    make_options(L);
    lua_getglobal(L, LUA_OSLIBNAME);
    vm_set_function(L, "exit", lua_exit);
    lua_pop(L, 1);
    vm_register(L, functions);
    luaL_newmetatable(L, here_class);
    vm_set_function(L, "__close", leave_here);
    lua_pop(L, 1);
}
