/* The largest values at the peak of a program's memory. */
#include "vm/check/largest.h"

#include <stdio.h>

#include "vm/check/traffic.h"

enum { LARGEST = 10 };

void largest_print(lua_State *L, const ml_plan *plan) {
    ml_plan_block list[LARGEST];
    int count = ml_plan_largest(plan, LARGEST, list);
    printf("largest at the peak\n");
    for (int i = 0; i < count; i++) {
        const ml_graph *g = list[i].graph;
        ml_ref n = list[i].node;
        const ml_origin *origin = n ? ml_graph_origin(g, n) : NULL;
        char size[64];
        vm_format_bytes(size, sizeof size, list[i].bytes);
        vm_push_type(L, g, n ? ml_graph_type(g, n) : &(ml_type){0});
        printf("  %10s  %s", size, n ? lua_tostring(L, -1) : "workspace");
        if (n && ml_graph_node(g, n)->op == ML_OP_STATE) {
            const ml_state *state = ml_graph_state(g, (uint32_t)ml_graph_args(g, n)[0]);
            printf("  state %s", state->name ? state->name : "?");
            origin = &state->origin;
        } else if (origin && origin->module && origin->module[0]) {
            printf("  in %s", origin->module);
        }
        if (origin && origin->file) printf("  %s:%d", origin->file, origin->line);
        printf("\n");
        lua_pop(L, 1);
    }
}

json_t *largest_json(lua_State *L, const ml_plan *plan) {
    ml_plan_block blocks[LARGEST];
    int count = ml_plan_largest(plan, LARGEST, blocks);
    json_t *list = json_array();
    for (int i = 0; i < count; i++) {
        const ml_graph *g = blocks[i].graph;
        ml_ref n = blocks[i].node;
        const ml_origin *origin = n ? ml_graph_origin(g, n) : NULL;
        vm_push_type(L, g, n ? ml_graph_type(g, n) : &(ml_type){0});
        json_t *item = json_pack("{s:s, s:I}", "type", n ? lua_tostring(L, -1) : "workspace",
                                 "bytes", (json_int_t)blocks[i].bytes);
        if (origin && origin->file) {
            json_object_set_new(item, "file", json_string(origin->file));
            json_object_set_new(item, "line", json_integer(origin->line));
        }
        json_array_append_new(list, item);
        lua_pop(L, 1);
    }
    return list;
}
