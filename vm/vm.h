/* The host: one Lua state, its session, and the bindings between them.
 *
 * Every vm/ file registers Lua functions from tables of vm_entry rows; the same rows feed the
 * editor definitions (stdlib/editor.lua). Rules for every binding:
 *   - validate arguments first, raising through vm_fail;
 *   - what C owns lives in a userdata (boxed) before anything else may raise, or in Lua's own
 *     buffers; the graph owns nodes, so a Tensor is only a reference;
 *   - runtime calls that raise run inside ml_protect (vm_protect), whose body touches no Lua;
 *   - only then raise, with vm_raise, which turns ml_error into a message with the script's line.
 * A script's frame is any Lua function whose chunk name does not start with VM_STDLIB. */
#ifndef ML_VM_H
#define ML_VM_H

#include <stdio.h>

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

#include "runtime/exec/program.h"
#include "vm/bindings/input_range.h"

#ifndef MLUA_VERSION
#define MLUA_VERSION "0.1"
#endif
#define VM_STDLIB "@mlua:" /* chunk names of embedded files: "@mlua:nn.lua" */

typedef enum { VM_RUN, VM_CHECK, VM_REPL } vm_mode;
typedef struct {
    const char *key, *text;
} vm_setting;
enum { VM_MAX_SETTINGS = 128, VM_MAX_STOPS = 16 };
typedef struct {
    vm_mode mode;
    const char *script; /* NULL: none */
    const char *device; /* NULL: the default */
    int dtype;          /* --dtype, an ml_dtype; -1: the device's default */
    bool fp8;           /* --dtype fp8: bf16, and products of blocks in 8 bits */
    bool json, quiet, types, bench, explain, memory_curve;
    bool facts;           /* of check: write all that is known about the script */
    const char *confined; /* of check: the folders that may be read; NULL: no limits */
    const char *buffers;  /* of check: unsaved texts by path, as JSON; NULL: none */
    const char *limits;   /* what the kernel enforces (known_confine) */
    FILE *json_out;       /* the stream for JSON (output.h) */
    const char *profile;  /* --profile: the path of the trace; NULL: none */
    int64_t profile_first, profile_last; /* --profile-steps; 0: the default */
    int64_t seed;
    vm_setting overrides[VM_MAX_SETTINGS];
    int override_count;
    vm_setting mesh[VM_MAX_SETTINGS]; /* axis name, size */
    int mesh_count;
    vm_setting layout[VM_MAX_SETTINGS]; /* --layout: an option of m.layout's presets, its value */
    int layout_count;
    double memory;         /* --memory: GiB of a rank's device that may be used; 0: all */
    int64_t gpus, hosts;   /* of tune: ranks, and on how many hosts; 0: not given */
    int64_t global_batch;  /* --batch of tune; 0: the script's */
    int64_t within;        /* of tune: seconds of its search; 0: not given */
    int64_t tries;         /* of tune: candidates that --measure runs */
    const char *precision; /* of tune: "any", or names; NULL: not given */
    const char *results;   /* of tune: the file of what was measured; NULL: none */
    bool every;            /* of tune: all layouts are planned */
    bool measure, serve;   /* serve: of check and tune: of generation */
    double latency, first; /* of tune --serve: milliseconds at most; 0: any */
    int64_t prompt_tokens; /* of tune --serve: those before `first`; 0: not given */
    int64_t ranks;         /* -n; 0: not given */
    ml_comm *comm;         /* with the other ranks; NULL: one process */
    int run;               /* which of MLUA_RUNS, from 1 */
    const char *from;      /* --from: whose weights; NULL: none */
    const char *adapter;   /* a folder of PEFT's, added to them; NULL: none */
    const char *task; /* "generate", "serve" or "export": the script runs to its first m.train */
    const char *script_text;   /* a script inside the binary, and its chunk's name; else NULL */
    const char *script_chunk;  /* "@models/llama.lua" */
    const char *prompt, *ids;  /* of generate; NULL: not given */
    int64_t tokens, top_k;     /* top_k 0: all */
    double temperature, top_p; /* top_p 0: all */
    double min_p, repetition_penalty, presence_penalty, frequency_penalty; /* 0: not given */
    int64_t samples, logprobs, rows;                                       /* 0: not given */
    const char *prompts, *system, *score, *weights;                        /* NULL: not given */
    const char *stops[VM_MAX_STOPS];
    int stop_count;
    bool chat, seed_given, batch_invariant;
    const char *host, *token_file; /* of serve, as the next four; NULL: 127.0.0.1, none */
    int64_t port, slots, chunk, queue, seconds; /* slots 0: not given */
    const char *out;                            /* of export: the folder; of tokenize: the file */
    const char *file_dtype;                     /* of its tensors; NULL: as they are */
    bool hf, adapter_alone;
    bool special;       /* of tokenize, as the next */
    int64_t train;      /* tokens of the tokenizer to train; 0: none */
    bool ascii, verify; /* of show, as the next three */
    const char *html;   /* the page to write; NULL: none */
    char **paths;       /* what is shown */
    int path_count;
    const char *run_folder; /* --out of a run; NULL: none */
    const char *command;    /* the command line, as a shell takes it */
    bool resume, new_data, new_sizes;
    bool watch;         /* --watch: the run continues with each saved script */
    const char *undo;   /* files of what an edit before left out and of what this one does, A:B */
    double undo_memory; /* GiB; 0: half of what is available */
    int64_t restarts;   /* how often ranks are started again when one dies */
    bool elastic;       /* with fewer data-parallel ones */
} vm_options;

/* Where an axis size was first written, for help lines. */
typedef struct {
    ml_axis axis;
    int64_t size;
    const char *file;
    int line;
} vm_axis_site;

/* A line of a script that computes something else than was probably meant (lineage.c). */
typedef struct {
    const char *file; /* this and the text are interned */
    int line;
    const char *text;
} vm_hint;

/* Which steps --profile measures, and how far the script is (profile.c). */
typedef struct {
    int64_t first, last, step;
    bool marked;   /* the script marks steps by core.begin_step */
    bool reported; /* the trace is written */
} vm_profile;

/* How far a dry run is (dry.h). */
typedef struct {
    bool runs, ended, called; /* called: a program was called, whose results are zeros */
    int64_t calls;            /* of programs since the last new one */
    double since;             /* when the first of them was made */
    const char *file;         /* where the script was ended; NULL where it called os.exit */
    int line;
    const char *message; /* of its assert or error that ended it; else NULL */
    int code;            /* that it called os.exit with */
} vm_dry;

/* An active call, as lua_Debug.i_ci names it. Of the calls below an active one the line stays. */
typedef struct CallInfo vm_call_id;
typedef struct {
    const vm_call_id *call; /* of core.from_here; NULL: none is active */
    const char *file;       /* of the script's function that is innermost below it; NULL: none */
    int line;
    bool alone; /* no function of the script runs below the call: nothing is looked for */
} vm_here;

typedef struct ml_vm {
    lua_State *L;
    ml_session *session;
    ml_graph *graph; /* the session's */
    const vm_options *options;
    int compute_dtype; /* of parameters as forward functions read them; -1 until asked for */
    ml_arena *arena;   /* interned strings: live as long as the graph that refers to them */
    ml_index strings;
    ML_VEC(const char *) texts;
    ML_VEC(vm_axis_site) sites;
    const char *module;             /* module path of new nodes */
    const char *file;               /* the last origin's file, interned */
    vm_here here;                   /* the origin of what the library creates */
    const vm_call_id *command;      /* of core.for_command; NULL: none is active */
    ml_index_uses index_uses;       /* declared by the library: one_hot, cross_entropy */
    ML_VEC(ml_ref) tainted;         /* nodes of the score function that is being traced */
    ML_VEC(vm_hint) hints;          /* in the order of their lines' first run */
    uint32_t hints_shown;           /* of them */
    ml_axis sequence;               /* the axis of positions; 0 until asked for */
    ML_VEC(uint8_t) dtype_sources;  /* by node: how the script gave its dtype (precision.h) */
    ML_VEC(ml_ref) explicit_inputs; /* whose dtype the script gave */
    bool fp8;                       /* products of blocks are marked: precision_mark_fp8 */
    bool exact;                     /* products run in the dtype of their operands */
    bool scanning;                  /* the step of a scan is traced */
    bool traces;     /* assignments to states belong to a program, or infer types alone */
    bool laid_out;   /* the script has given a layout */
    bool polls_stop; /* the script asks core.stopped() by itself */
    vm_profile profile;
    vm_dry dry;
    bool discards;            /* standard output is discarded; */
    int shown;                /* its descriptor meanwhile */
    FILE *log;                /* of the run's folder; NULL: none */
    const char *unsaved;      /* why the run's end is not saved, interned; NULL: it is, or no run */
    bool device_failed;       /* an error of the device, or of other ranks, was raised */
    ml_target check_target;   /* of a check and the prompt: what is planned for */
    int64_t check_ranks;      /* of the GPU that is planned for; 0: of no known one */
    const char *check_device; /* its description */
    struct {
        bool given;    /* the script gave math.randomseed a seed: the session's does not count */
        uint64_t hash; /* of all the seeds given */
        uint64_t compared; /* the hash that was compared between ranks last */
        const char *file;  /* where the last was; NULL: none */
        int line;
    } random;
    /* Metatables, by lua_topointer: each element of a host array and each operand asks for one. */
    const void *host_class, *tensor_class, *state_class;
    int tensor_metatable, state_metatable, states; /* registry; states: id + 1 -> State */
    struct vm_updates *updates;                    /* what is assigned now (updates.c) */
    struct vm_recording *recording; /* that notes assignments now (recording.c); NULL: none */
    uint64_t objects;               /* that Lua has made (order.c) */
    void *last_object;
    ptrdiff_t userdata_offset[3]; /* of the memory in a userdata's block, by its user values */
} ml_vm;

typedef struct {
    const char *name;
    lua_CFunction function;
    const char *signature; /* "axis: Axis|string, start?: integer -> Tensor" */
    const char *doc;
} vm_entry;

/* host.c: states, chunks, strings. */
ml_vm *vm_of(lua_State *L);
ml_status vm_new(const vm_options *options, ml_vm **vm);
void vm_free(ml_vm *vm);
/* At the end of the process, which frees what a check has made at once; sanitizers are to see that
 * none of it is lost. */
void vm_end(ml_vm *vm);
/* Load a text chunk with Lua's traps closed (traps.h); LUA_OK with a function pushed, or an error
 * code with a message. `env` is the stack index of its environment, or 0. */
int vm_load(lua_State *L, const char *text, size_t size, const char *chunk, int env);
int vm_load_input(lua_State *L, const char *text, size_t size,
                  const char *chunk); /* of the prompt */
void vm_save_source(lua_State *L, const char *chunk, const char *text, size_t size);
int vm_load_file(lua_State *L, const char *path, int env);
const char *vm_intern(lua_State *L, const char *text); /* lives as long as the session; may raise */
/* The text of line `line` of a loaded chunk ("gpt.lua" or "@gpt.lua"): pushes it, or nil. */
void vm_push_line(lua_State *L, const char *file, int line);
void vm_push_sources(lua_State *L); /* the table of the texts that were loaded, by file */
/* Push the whole text of a loaded chunk, or nil. */
void vm_push_source(lua_State *L, const char *file);
/* Run the function under `arguments` values; a failure leaves an error value and prints nothing. */
int vm_call(lua_State *L, int arguments, int results);
/* End the process at once, with what it printed and without its libraries' destructors. */
_Noreturn void vm_exit(int code);
/* The exit code of a script that ends with `code`: 73 instead of 0, after a line on standard error,
 * where the end of its run is not saved. */
int vm_end_code(lua_State *L, int code);
extern volatile int vm_stop, vm_stop_signal; /* signals that asked to stop; the last one */
void vm_catch_signals(ml_vm *vm);

/* error.c: messages: line, operands, origin, help. */
_Noreturn int vm_fail_with(lua_State *L, const ml_ref *operands, int count, const char *help,
                           const char *format, ...) __attribute__((format(printf, 5, 6)));
#define vm_fail(L, help, ...) vm_fail_with(L, NULL, 0, help, __VA_ARGS__)
_Noreturn void vm_raise(lua_State *L); /* this thread's ml_error */
void vm_check(lua_State *L, ml_status status);
void vm_protect(lua_State *L, void (*body)(void *), void *argument); /* ml_protect, then raise */
int vm_message_handler(lua_State *L);
/* The innermost frame of a script; false where there is none. */
bool vm_script_frame(lua_State *L, lua_Debug *frame);
/* Likewise, where it was called later than the call `end`; else that is *frame, if it is active. */
bool vm_script_frame_above(lua_State *L, const vm_call_id *end, lua_Debug *frame);
void vm_error_register(lua_State *L);
const char *vm_file_of(const char *source); /* of a frame: "gpt.lua" for "@gpt.lua" */
/* Write the rendered error at the top of the stack to stderr and pop it. */
void vm_finish_error(lua_State *L); /* a string of plain Lua on top becomes an error */
void vm_print_error(lua_State *L);
bool vm_is_interrupt(lua_State *L, int index);

/* globals.c: names that were never set. All but the raw read raise for one. */
void vm_globals_register(lua_State *L);             /* the last: it copies the globals */
void vm_raw_global(lua_State *L, const char *name); /* pushes it, or nil */
void vm_push_library_globals(lua_State *L);         /* the environment of stdlib/ */
/* Push a function of a module of stdlib/: "mlua.help", "explain". */
void vm_push_library(lua_State *L, const char *module, const char *name);

/* libraries.c: what differs in Lua's libraries. */
void vm_libraries_register(lua_State *L);
void vm_seed_random(lua_State *L);    /* math.random follows the session's seed */
void vm_compare_random(lua_State *L); /* raises where ranks have seeded it differently */

/* order.c: pairs, next and table.sort, in the same order in each process; and what
 * allocates for Lua. */
void *order_allocate(void *vm, void *block, size_t old_bytes, size_t bytes);
void order_register(lua_State *L);
void order_push_keys(lua_State *L, int index); /* the list of a table's keys in that order */

/* names.c: what the script calls a tensor. Pushes the name, or returns false. */
bool vm_push_name(lua_State *L, const lua_Debug *frame, ml_ref n);
/* Push the value of a chain of names ("self.wq") where the frame is; false where it has none. */
bool vm_push_chain(lua_State *L, const lua_Debug *frame, const char *text, size_t length);

/* hints.c: help lines that take a look at the script. */
/* Push the help for an error of plain Lua, or nil; the file and the line are those of the error,
 * the file NULL where it is not a script's. */
void vm_push_plain_help(lua_State *L, const char *text, const char *file, int line);
void vm_hints_register(lua_State *L);
void vm_push_nil_help(lua_State *L); /* which name of the script's line is nil */
/* Where a method was called with a dot, or a function of a library with a colon, push what the
 * error's message then and its help; *where is the frame of that call. */
bool vm_push_call_help(lua_State *L, lua_Debug *where);

/* lineage.c: what the nodes behind a tensor say. Hints are printed once each, by the function that
 * shows what was traced (check, the prompt). */
bool vm_depends_on_input(lua_State *L, ml_ref n);
void vm_add_hint(lua_State *L, const ml_origin *origin, const char *text); /* text is interned */
void vm_print_hints(lua_State *L);          /* those not yet printed, on standard output */
struct json_t *vm_hints_json(lua_State *L); /* all: a list of {file, line, text} */
/* A hint where a DOT of two activations has the positions of both as one batch axis. */
void vm_hint_scores(lua_State *L, ml_ref dot);

/* value.c: arguments and results. */
typedef struct {
    ml_axis id;
    int64_t size;
} vm_axis;
extern const char *const vm_tensor_class,
    *const vm_state_class, *const vm_axis_class, *const vm_host_class,
                                                     *const vm_program_class,
                                                         *const vm_corpus_class,
                                                             *const vm_random_class;
void vm_axis_register(lua_State *L);
int vm_push_tensor(lua_State *L, ml_ref n);
bool vm_is_tensor(lua_State *L, int index); /* a Tensor or a State */
ml_ref vm_tensor(lua_State *L, int index, const char *what);
ml_ref vm_operand(lua_State *L, int index); /* 0 where it is no tensor */
bool vm_is_state(lua_State *L, int index, uint32_t *id);
uint32_t vm_state(lua_State *L, int index, const char *what);
void vm_push_axis(lua_State *L, ml_axis id, int64_t size);
vm_axis vm_new_axis(lua_State *L, int index, const char *what);    /* an Axis */
vm_axis vm_listed_axis(lua_State *L, int index, const char *what); /* of "the axes of a tensor" */
/* An axis by name or as an Axis; `op` is the caller, n the tensor, for messages. */
ml_axis vm_axis_id(lua_State *L, int index, const char *op);
ml_axis vm_axis_in(lua_State *L, int index, ml_ref n, const char *op);
/* One that n has; `what` is the beginning of the message for others: "cannot slice". */
vm_axis vm_axis_of(lua_State *L, int index, ml_ref n, const char *op, const char *what);
ml_dtype vm_dtype(lua_State *L, int index, int fallback); /* -1: required */
int64_t vm_integer(lua_State *L, int index, const char *what);
bool vm_option(lua_State *L, int table, const char *key); /* pushes the field where it is set */
void vm_check_options(lua_State *L, int table, const char *what, const char *const *known);
/* Push "f32[batch=8, seq=4]"; "f32[8, 4]" where names is NULL. */
void vm_push_shape(lua_State *L, ml_dtype dtype, int rank, const int64_t *dims,
                   const char *const *names);
void vm_push_type(lua_State *L, const ml_graph *g, const ml_type *t);
void vm_format_bytes(char *out, size_t size, int64_t bytes); /* "12.5 MiB" */
void vm_push_suggestion(lua_State *L, const char *word,
                        int words); /* list at `words`; pushes or nil */
bool vm_is_class(lua_State *L, int index, const char *class_name);
const char *vm_typename(lua_State *L, int index); /* "a tensor", "a table": for messages */
/* Raise where there are more than `most` arguments: what would be ignored. Of a method they are
 * reported without its tensor. */
void vm_most_arguments(lua_State *L, int most, const char *what);
void vm_most_inputs(lua_State *L, int most, const char *what); /* of a function */
void vm_read_axes(lua_State *L, int index, const char *what,
                  ml_type *type); /* appends Axis values */
int64_t vm_table_length(lua_State *L, int table);

/* unknown.c: raise for the method that is asked for at index 2; the known ones are the keys of the
 * tables at `methods` and `others` (0: none). */
_Noreturn int vm_missing_method(lua_State *L, int methods, int others);
int vm_no_new_field(lua_State *L); /* __newindex of tensors and states */

/* A node to be made inside ml_protect. */
enum { VM_MAX_SOURCES = 64, VM_MAX_ARGS = 3 + ML_MAX_AXES * 2 };
typedef struct {
    ml_vm *vm;
    ml_graph *graph;
    ml_origin origin;
    ml_op op;
    int source_count, arg_count;
    ml_ref *sources;
    int64_t args[VM_MAX_ARGS];
    const ml_type *type;
    ml_ref result;
} vm_node;
void vm_begin(lua_State *L, vm_node *node, ml_op op); /* sets the origin from the script's frame */
ml_ref vm_add(lua_State *L, vm_node *node);
/* updates.c: `value` is that of the state from the end of the step on. */
typedef struct vm_updates vm_updates;
void vm_add_update(lua_State *L, uint32_t state, ml_ref value);
/* Those of core.take_updates; false for another value. */
bool vm_to_updates(lua_State *L, int index, const ml_update **list, int *count);
/* recording.c: `given` was assigned, as `value` of the state's dtype and axes. */
typedef struct vm_recording vm_recording;
void vm_record_assignment(vm_recording *r, uint32_t state, ml_ref given, ml_ref value);
/* op_methods.c: a method's operands and arguments by the op's row, checked. */
void vm_read_op(lua_State *L, ml_op op, vm_node *node, ml_ref *sources);
ml_ref vm_unary(lua_State *L, ml_op op, ml_ref a, const ml_type *type);
void vm_origin(lua_State *L, ml_origin *origin);
ml_ref vm_number(lua_State *L, int index, ml_dtype dtype); /* a CONST */
ml_ref vm_number_from(lua_State *L, int index, ml_dtype dtype, const ml_origin *origin);
ml_ref vm_cast(lua_State *L, ml_ref n, ml_dtype dtype);
ml_ref vm_state_node(lua_State *L, uint32_t id);
void vm_push_state(lua_State *L, uint32_t id); /* the one State of an id */
/* Push the State of a state that C code made, and name it by the text at index `name`. */
void vm_adopt_state(lua_State *L, uint32_t id, int name);
ml_ref vm_state_value(lua_State *L, uint32_t id); /* parameters cast to the compute dtype */
void vm_new_class(lua_State *L, const char *name, const vm_entry *methods, lua_CFunction index,
                  lua_CFunction gc);

/* Set a field of the table at the top of the stack. */
static inline void vm_set_integer(lua_State *L, const char *key, lua_Integer value) {
    lua_pushinteger(L, value), lua_setfield(L, -2, key);
}
static inline void vm_set_number(lua_State *L, const char *key, double value) {
    lua_pushnumber(L, value), lua_setfield(L, -2, key);
}
static inline void vm_set_boolean(lua_State *L, const char *key, bool value) {
    lua_pushboolean(L, value), lua_setfield(L, -2, key);
}
static inline void vm_set_string(lua_State *L, const char *key, const char *text) { /* NULL: nil */
    lua_pushstring(L, text), lua_setfield(L, -2, key);
}
static inline void vm_set_function(lua_State *L, const char *key, lua_CFunction function) {
    lua_pushcfunction(L, function), lua_setfield(L, -2, key);
}

/* Registration: each adds its rows to the table `core` at the top of the stack. */
void vm_register(lua_State *L, const vm_entry *entries);
void vm_document(lua_State *L, int function, const vm_entry *entry);
const vm_entry *vm_documentation(lua_State *L, int function); /* NULL where it has none */
void vm_ops_register(lua_State *L);
void vm_tensor_register(lua_State *L);
void vm_documentation_register(lua_State *L);
void vm_op_methods_register(lua_State *L); /* after tensor.c's, which come first */
void vm_unknown_register(lua_State *L);
void vm_state_register(lua_State *L);
void vm_updates_register(lua_State *L);
void vm_recording_register(lua_State *L);
void vm_host_register(lua_State *L);
void vm_program_register(lua_State *L);
void vm_programs_register(lua_State *L);
void vm_attention_register(lua_State *L);
void vm_conv_register(lua_State *L);
void vm_scan_register(lua_State *L);
void vm_increment_register(lua_State *L);
void vm_weights_register(lua_State *L);
void vm_corpus_register(lua_State *L);
void vm_placement_register(lua_State *L);
void vm_samples_register(lua_State *L);
void vm_tensorfile_register(lua_State *L);
void vm_json_register(lua_State *L);
void vm_tokenizer_register(lua_State *L);
void vm_views_register(lua_State *L);
void vm_show_register(lua_State *L);
void vm_serve_register(lua_State *L);
/* A box for a value of JSON, at the top of the stack; and what is in it in the box's place. */
struct json_t **vm_push_json(lua_State *L);
void vm_open_json(lua_State *L);
void vm_run_register(lua_State *L);
void vm_checkpoint_register(lua_State *L);
void vm_service_register(lua_State *L);
void vm_check_register(lua_State *L);
void vm_processes_register(lua_State *L);
void vm_known_register(lua_State *L); /* after the traps */
void vm_lsp_register(lua_State *L);
void vm_layout_register(lua_State *L);
void vm_lineage_register(lua_State *L);
void vm_profile_register(lua_State *L);

/* service.c: the dtype that parameters are read in. */
ml_dtype vm_compute_dtype(lua_State *L);
/* A run opens its device; a check and the prompt find out for which one they plan. */
void vm_open_device(lua_State *L);
void vm_start_device(lua_State *L); /* open the device, to run a program: the prompt's too */
/* The prompt plans for a device that is not here, or for several ranks. */
bool vm_cannot_run(const ml_vm *vm);
const ml_target *vm_target(lua_State *L);

/* hostarray.c: typed arrays in host memory. */
typedef struct {
    ml_dtype dtype;
    int rank;
    int64_t dims[ML_MAX_AXES];
    int64_t count;
    void *data;
} vm_host;
vm_host *vm_push_host(lua_State *L, ml_dtype dtype, int rank, const int64_t *dims);
vm_host *vm_to_host(lua_State *L, int index); /* NULL where it is none */
/* `owner` (NULL: none) is named in errors. */
void vm_store_number(lua_State *L, int index, const char *owner, ml_dtype dtype, void *data,
                     int64_t i);
void vm_push_element(lua_State *L, ml_dtype dtype, const void *data, int64_t i);

/* contents.c: a tensor's contents, as a script passes them. */
typedef struct {
    const char *name; /* for messages: input "x", or a state's name */
    bool is_state;
    ml_dtype dtype;
    int rank;
    int64_t dims[ML_MAX_AXES];
    const char *axes[ML_MAX_AXES]; /* the first is NULL where they have no names */
} vm_wanted;
void vm_want(lua_State *L, const char *name, const ml_type *type, vm_wanted *wanted);
/* The elements in row-major order, from the number, table or host array at `index`; raises for
 * another shape. Pushes what holds their memory. */
const void *vm_contents(lua_State *L, int index, const vm_wanted *wanted);

/* run.c: add to the log of a run's folder, where there is one. */
void vm_log(lua_State *L, const char *text, size_t size);

/* program.c */
typedef struct {
    ml_program *program;  /* NULL in check mode */
    ml_plan *plan;        /* owned; check mode only */
    ml_roots roots;       /* these and the arrays below are owned (ml_alloc) */
    int64_t group;        /* ranks that run it by themselves (shard/groups.h); 0: all */
    ml_plan_list applied; /* while it is made: of microbatches whose sums it applies */
    ml_program *lead;     /* whose steps its microbatches are of (roots.mixed); NULL: its own */
    ml_type *output_types;
    uint32_t *input_ids;         /* by position in the script's list */
    int input_count, used_count; /* listed; those that the compiled program reads */
    double seconds;              /* that making it took */
    bool started;                /* and not yet finished */
    ml_arena *arena;             /* of the ranges; NULL: none were looked for */
    ml_input_ranges ranges;
} vm_program;
vm_program *vm_to_program(lua_State *L, int index);
const ml_plan *vm_program_plan(const vm_program *program);

/* ranges.c: the values that inputs may have. */
void vm_find_ranges(lua_State *L, vm_program *program);
void vm_check_range(lua_State *L, const vm_program *program, uint32_t input, const void *data);
/* Of contents of another type than the input's, and by another name than input "x". */
void vm_check_range_of(lua_State *L, const vm_program *program, uint32_t input, const char *name,
                       const ml_type *type, const void *data);
/* Push ": element 13 (batch 2, seq 5; counted from 1)"; of a type without axes nothing. */
const char *vm_push_place(lua_State *L, const ml_type *type, int64_t i);
void vm_ranges_register(lua_State *L);

/* profile.c: --profile. The two first for the command line: whether --profile-steps accepts this
 * text, and whether the file can be written. All others do nothing without --profile. */
bool vm_profile_parse_steps(const char *text, vm_options *options);
bool vm_profile_writable(const char *path);
void vm_profile_attach(lua_State *L); /* the device has been opened */
void vm_profile_run(lua_State *L);    /* a program is about to run */
double vm_profile_clock(lua_State *L);
void vm_profile_span(lua_State *L, const char *what, double begin); /* of the host, until now */
void vm_profile_finish(lua_State *L);                               /* the script is over */

/* check.c: the report of programs that the script made but did not report itself. */
int vm_report_rest(lua_State *L);
/* repl.c; the value is the exit code. */
int repl_run(ml_vm *vm);

#endif
