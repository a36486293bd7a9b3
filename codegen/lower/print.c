/* Schedules and kernel IR as text, for MLUA_DEBUG=3 and golden tests. */
#include "codegen/lower/lower.h"

static const char *const scope_names[] = {"row", "column", "all"};

static void print_operand_access(const ml_inst *inst, ml_text *out) {
    ml_text_add(out, "p%d", inst->operand);
    if (inst->index != ML_NO_INST) ml_text_add(out, "[%%%d]", inst->index);
    if (inst->guard != ML_NO_INST) ml_text_add(out, " if %%%d", inst->guard);
}

static void print_const(const ml_inst *inst, ml_text *out) {
    if (ml_dtypes[inst->dtype].kind == ML_KIND_FLOAT)
        ml_text_add(out, "%.9g", inst->constant.number);
    else
        ml_text_add(out, "%lld", (long long)inst->constant.integer);
}

static void print_inst(const ml_kernel_ir *ir, int i, ml_text *out) {
    const ml_inst *inst = &ir->inst[i];
    ml_text_add(out, "    %d%c %%%d %s%s = ", inst->phase, inst->level == ML_LEVEL_ROW ? 'r' : 'e',
                i, ml_dtypes[inst->dtype].name, inst->saved ? " saved" : "");
    switch ((ml_inst_kind)inst->kind) {
    case ML_INST_CONST: print_const(inst, out); break;
    case ML_INST_INDEX: ml_text_add(out, "index %d", inst->operand); break;
    case ML_INST_LOAD:
        ml_text_add(out, "load ");
        print_operand_access(inst, out);
        break;
    case ML_INST_STORE:
        ml_text_add(out, "store %%%d to ", inst->src[0]);
        print_operand_access(inst, out);
        break;
    case ML_INST_MAP:
        ml_text_add(out, "%s%s", inst->quick ? "quick " : "", ml_ops[inst->op].name);
        for (int s = 0; s < 3; s++)
            if (inst->src[s] != ML_NO_INST) ml_text_add(out, " %%%d", inst->src[s]);
        break;
    case ML_INST_REDUCE:
        ml_text_add(out, "%s by %s %%%d", ml_ops[inst->op].name, scope_names[inst->scope],
                    inst->src[0]);
        if (inst->scope != ML_SCOPE_ROW) ml_text_add(out, " to p%d", inst->operand);
        break;
    }
    ml_text_add(out, "\n");
}

void ml_kernel_ir_print(const ml_kernel_ir *ir, const ml_step *step, ml_text *out) {
    ml_text_add(out, "  rows");
    for (int i = 0; i < ir->loop_count; i++)
        ml_text_add(out, "%s %lld", i == ir->row_loops ? " columns" : "", (long long)ir->size[i]);
    if (ir->chunks) ml_text_add(out, " chunks %lld", (long long)ir->chunks);
    ml_text_add(out, " phases %d\n", ir->phases);
    for (int o = 0, written = 0; o < ir->operand_count; o++) {
        const ml_operand *operand = &ir->operand[o];
        ml_text_add(out, "    p%d %s %s", o, operand->written ? "writes" : "reads",
                    ml_dtypes[operand->dtype].name);
        int at = operand->written && step != NULL ? step->read_count + written++ : o;
        if (step != NULL) ml_text_add(out, " v%u", step->values[at]);
        ml_text_add(out, " strides");
        for (int i = 0; i < ir->loop_count; i++)
            ml_text_add(out, " %lld", (long long)operand->stride[i]);
        ml_text_add(out, "\n");
    }
    for (int i = 0; i < ir->inst_count; i++) print_inst(ir, i, out);
}

static void print_value(const ml_schedule *s, uint32_t id, ml_text *out) {
    const ml_value *value = &s->values.at[id];
    const ml_storage *storage = &s->storages.at[value->storage];
    static const char *const kinds[] = {"temporary", "state",      "input",
                                        "saved",     "coordinate", "host"};
    ml_text_add(out, " v%u:%%%u in %s", id, value->node, kinds[storage->kind]);
    if (storage->kind == ML_STORAGE_TEMPORARY)
        ml_text_add(out, " s%u", value->storage);
    else
        ml_text_add(out, " %u", storage->id);
    if (value->offset) ml_text_add(out, " +%lld", (long long)value->offset);
}

const char *ml_step_kind_name(ml_step_kind kind) {
    static const char *const names[] = {
        [ML_STEP_KERNEL] = "kernel",       [ML_STEP_GEMM] = "gemm",
        [ML_STEP_ATTENTION] = "attention", [ML_STEP_COPY] = "copy",
        [ML_STEP_RAGGED] = "ragged",       [ML_STEP_COLLECTIVE] = "collective",
        [ML_STEP_LOOP] = "loop",           [ML_STEP_HOST_COPY] = "host_copy",
        [ML_STEP_WAIT] = "wait",
    };
    return names[kind];
}

double ml_step_sent(const ml_collective_step *step) {
    const bool parts = ml_collectives[step->kind].result == ML_RESULT_SCATTERED;
    double operand =
        (double)step->count * ml_dtypes[step->dtype].bytes * (parts ? (double)step->ranks : 1);
    return ml_collective_sent(step->kind, operand, (double)step->ranks);
}

const char *ml_step_label(const ml_step *step) {
    bool labelled = step->kind == ML_STEP_KERNEL && step->kernel != NULL && step->kernel->label;
    return labelled ? step->kernel->label : ml_step_kind_name(step->kind);
}

/* What a library chooses its kernel by: sizes and strides. */
static void print_gemm(const ml_gemm *g, ml_text *out) {
    const long long sizes[] = {g->m, g->n, g->k, g->batch[0], g->batch[1], g->batch[2]};
    const long long strides[] = {g->a_row, g->a_col, g->b_row, g->b_col, g->c_row, g->c_col};
    ml_text_add(out, "  m %lld n %lld k %lld batch %lld %lld %lld, strides", sizes[0], sizes[1],
                sizes[2], sizes[3], sizes[4], sizes[5]);
    for (int i = 0; i < 6; i += 2)
        ml_text_add(out, " %c %lld %lld", "abc"[i / 2], strides[i], strides[i + 1]);
    ml_text_add(out, "%s\n",
                g->accumulate                     ? " accumulates"
                : g->epilogue == ML_EPILOGUE_BIAS ? " bias"
                                                  : "");
}

static void print_attention(const ml_attention_step *a, ml_text *out) {
    ml_text_add(out, "  heads %lld of %lld, seq %lld of %lld, strides", (long long)a->heads,
                (long long)a->kv_heads, (long long)a->seq, (long long)a->kv_seq);
    for (int i = 0; i < a->operand_count; i++)
        ml_text_add(out, "%s %lld %lld %lld", i ? "," : "", (long long)a->strides[i].batch[0],
                    (long long)a->strides[i].head, (long long)a->strides[i].seq);
    ml_text_add(out, "\n");
}

void ml_lower_print(const ml_schedule *s, ml_text *out) {
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        ml_text_add(out, "step %u: %s %s of %%%u", i, ml_step_kind_name(step->kind),
                    step->kernel && step->kernel->label ? step->kernel->label : "", step->node);
        ml_text_add(out, " (%.2f MB, %.3g FLOP)", (double)step->bytes / 1e6, step->flops);
        ml_text_add(out, ", reads");
        for (int v = 0; v < step->read_count; v++) print_value(s, step->values[v], out);
        ml_text_add(out, ", writes");
        for (int v = 0; v < step->write_count; v++) {
            print_value(s, step->values[step->read_count + v], out);
            if (step->may_alias != NULL && step->may_alias[v] != 0)
                ml_text_add(out, " over reads %llx", (unsigned long long)step->may_alias[v]);
        }
        ml_text_add(out, "\n");
        if (step->gemm != NULL) print_gemm(step->gemm, out);
        if (step->attention != NULL) print_attention(step->attention, out);
        if (step->ir != NULL) ml_kernel_ir_print(step->ir, step, out);
        if (step->few_rows != NULL && step->few_rows->computes != NULL)
            ml_kernel_ir_print(step->few_rows->computes, NULL, out);
    }
}
