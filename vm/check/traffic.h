/* What the ranks of a layout send one another, for `mlua check` (traffic.c). */
#ifndef ML_TRAFFIC_H
#define ML_TRAFFIC_H

#include <jansson.h>

#include "vm/vm.h"

enum { VM_MOVES = 10 };
typedef struct {
    const ml_plan *plan;
    const ml_step *step;
    int64_t bytes, count; /* that leave one rank, each time; times a step */
    bool modules;         /* of several modules */
} vm_move;
/* An axis that a mesh axis does not divide. */
typedef struct {
    ml_axis axis;
    int mesh;
    int64_t size, part; /* of the whole, and of each rank */
} vm_filled;
enum { VM_FILLED = 12 };
typedef struct {
    const ml_layout *layout; /* NULL: one rank */
    ml_traffic total[ML_MAX_MESH][ML_COLLECTIVE_KINDS];
    vm_move largest[VM_MOVES]; /* largest first */
    int count;
    ml_division division;
    vm_filled filled[VM_FILLED]; /* of states and inputs, each once */
    int filled_count;
} vm_traffic;

/* Push what to say of the work that all ranks along mesh axis i do alike, where it is most of it
 * ("its 2 ranks do 98.4% of the work alike, ..."); pushes nothing and gives false elsewhere. */
bool traffic_push_undivided(lua_State *L, const ml_layout *layout, const ml_division *division,
                            int i);

/* A program that runs `times` times a step. */
void traffic_add(vm_traffic *t, const ml_plan *plan, int64_t times);
/* A state or an input of the programs, so placed. */
void traffic_add_placed(vm_traffic *t, const ml_layout *layout, const ml_type *type,
                        const ml_placements *at);
void traffic_print_ranks(lua_State *L, const vm_traffic *t);
/* `when`: "in one step". */
void traffic_print(lua_State *L, const vm_traffic *t, const char *when);
/* A line about a node, whose type prints so. */
void traffic_print_node(const ml_graph *g, ml_ref n, const char *type);
/* The tensors of the global program `roots` of the session, with their placement. */
void traffic_print_types(lua_State *L, const ml_roots *roots);
/* Likewise, and what ranks send to compute the outputs, which stay where their ops put them. */
void traffic_print_typed(lua_State *L, const ml_roots *roots);
/* A tensor of the session's graph: its type and placement, a rank's part, and what the ranks
 * send to compute it. False where there is no layout of several ranks. */
bool traffic_print_tensor(lua_State *L, ml_ref n);
/* Where the layout puts tensors of the session's graph, as their ops give it; known[i]: whether it
 * does. All are unknown where there is no layout or it fits one of them not. */
void traffic_place(lua_State *L, ml_arena *arena, const ml_ref *nodes, int count,
                   ml_placements *places, bool *known);
void traffic_json(lua_State *L, const vm_traffic *t, json_t *object);

#endif
