/* What must hold of every schedule (MLUA_VERIFY=1 and tests): steps read what earlier steps wrote,
 * memory that is addressed by loops is inside its storage, instructions are in order. */
#include "codegen/lower/lower.h"

#include <string.h>

typedef struct {
    const ml_schedule *s;
    uint32_t step;
    bool *written; /* by storage */
} verifier;

static void require(const verifier *v, bool holds, const char *what) {
    if (!holds) ml_raise(ML_INTERNAL, "step %u of the schedule: %s", v->step, what);
}

static int64_t storage_elements(const verifier *v, const ml_value *value) {
    return v->s->storages.at[value->storage].bytes / ml_dtypes[value->type.dtype].bytes;
}

/* offset + sum over loops of 0 .. (size - 1) * stride must be elements of the storage. */
static void require_inside(const verifier *v, const ml_value *value, const int64_t *size,
                           const int64_t *stride, int loops) {
    int64_t low = value->offset, high = value->offset;
    for (int i = 0; i < loops; i++) {
        if (size[i] == 0) return;
        *(stride[i] < 0 ? &low : &high) += (size[i] - 1) * stride[i];
    }
    require(v, low >= 0 && high < storage_elements(v, value), "an operand leaves its storage");
}

static bool computed_address(const ml_kernel_ir *ir, int operand) {
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        bool here =
            (inst->kind == ML_INST_LOAD || inst->kind == ML_INST_STORE) && inst->operand == operand;
        if (here && (inst->index != ML_NO_INST || inst->guard != ML_NO_INST)) return true;
    }
    return false;
}

static bool is_partial(const ml_kernel_ir *ir, int operand) {
    for (int i = 0; i < ir->inst_count; i++)
        if (ir->inst[i].kind == ML_INST_REDUCE && ir->inst[i].scope != ML_SCOPE_ROW &&
            ir->inst[i].operand == operand)
            return true;
    return false;
}

static void verify_operands(const verifier *v, const ml_step *step) {
    const ml_kernel_ir *ir = step->ir;
    require(v, ir->operand_count == step->read_count + step->write_count, "operands are missing");
    for (int o = 0; o < ir->operand_count; o++) {
        const ml_operand *operand = &ir->operand[o];
        const ml_value *value = &v->s->values.at[step->values[o]];
        require(v, operand->written == (o >= step->read_count), "reads must come before writes");
        require(v, operand->dtype == value->type.dtype, "an operand has another dtype");
        if (v->s->target->kind == ML_TARGET_CUDA)
            require(v, value->offset * ml_dtypes[operand->dtype].bytes % 16 == 0,
                    "an operand is not aligned");
        if (!computed_address(ir, o) && !is_partial(ir, o))
            require_inside(v, value, ir->size, operand->stride, ir->loop_count);
    }
}

static void verify_insts(const verifier *v, const ml_kernel_ir *ir) {
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        bool memory = inst->kind == ML_INST_LOAD || inst->kind == ML_INST_STORE;
        require(v, inst->kind <= ML_INST_REDUCE, "an instruction is unknown");
        for (int s = 0; s < 3; s++)
            require(v, inst->src[s] == ML_NO_INST || inst->src[s] < i, "a source comes later");
        require(v, inst->index == ML_NO_INST || (memory && inst->index < i), "a late index");
        require(v, inst->guard == ML_NO_INST || (memory && inst->guard < i), "a late guard");
        require(v, inst->phase < ir->phases, "a phase is out of range");
        if (inst->kind == ML_INST_INDEX)
            require(v, inst->operand < ir->loop_count, "a loop is out of range");
        if (memory) require(v, inst->operand < ir->operand_count, "an operand is out of range");
        if (inst->kind == ML_INST_LOAD)
            require(v, !ir->operand[inst->operand].written, "a load from a written operand");
    }
}

static void verify_kernel(const verifier *v, const ml_step *step) {
    const ml_kernel_ir *ir = step->ir;
    require(v, ir->loop_count >= 1 && ir->loop_count <= ML_MAX_LOOPS, "the loops are too many");
    require(v, ir->row_loops >= 1 && ir->row_loops <= ir->loop_count, "there are no rows");
    verify_operands(v, step);
    verify_insts(v, ir);
    for (int w = 0; w < step->write_count && step->may_alias != NULL; w++)
        require(v, step->read_count >= 64 || step->may_alias[w] >> step->read_count == 0,
                "a write may overwrite what is not read");
}

static void verify_matrix(const verifier *v, uint32_t value, int64_t rows, int64_t cols,
                          int64_t row, int64_t col, const int64_t *batch,
                          const int64_t *batch_stride) {
    int64_t size[2 + ML_GEMM_BATCHES] = {rows, cols}, stride[2 + ML_GEMM_BATCHES] = {row, col};
    for (int i = 0; i < ML_GEMM_BATCHES; i++) {
        size[2 + i] = batch[i];
        stride[2 + i] = batch_stride[i];
    }
    require(v, row == 1 || col == 1, "a matrix has no unit stride");
    require(v, row == 1 ? col >= rows : row >= cols, "a matrix overlaps itself");
    require_inside(v, &v->s->values.at[value], size, stride, 2 + ML_GEMM_BATCHES);
}

static void verify_gemm(const verifier *v, const ml_step *step) {
    const ml_gemm *g = step->gemm;
    verify_matrix(v, step->values[0], g->m, g->k, g->a_row, g->a_col, g->batch, g->a_batch);
    verify_matrix(v, step->values[1], g->k, g->n, g->b_row, g->b_col, g->batch, g->b_batch);
    verify_matrix(v, step->values[step->read_count], g->m, g->n, g->c_row, g->c_col, g->batch,
                  g->c_batch);
    require(v,
            step->read_count == 2 + (g->epilogue == ML_EPILOGUE_BIAS) + g->accumulate + g->scaled,
            "a product's operands");
    if (g->accumulate)
        verify_matrix(v, step->values[step->read_count - 1 - g->scaled], g->m, g->n, g->c_row,
                      g->c_col, g->batch, g->c_batch);
}

/* Contiguous in the type's order. */
static bool is_block(const verifier *v, uint32_t value) {
    const ml_value *block = &v->s->values.at[value];
    int64_t expected = 1;
    for (int i = block->type.rank - 1; i >= 0; i--) {
        if (block->type.size[i] != 1 && block->stride[i] != expected) return false;
        expected *= block->type.size[i];
    }
    return true;
}

/* A GPU refuses to launch a block that asks for more shared memory than it may have. */
static void verify_launches(const verifier *v, const ml_kernel *kernel) {
    const ml_target *target = v->s->target;
    for (; kernel && target->kind == ML_TARGET_CUDA; kernel = kernel->next)
        require(v, kernel->shared_bytes <= ml_target_shared(target->arch),
                "a block has too much shared memory");
}

static void verify_steps(verifier *v) {
    const ml_schedule *s = v->s;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        v->step = i;
        for (int r = 0; r < step->read_count; r++) {
            uint32_t storage = s->values.at[step->values[r]].storage;
            require(v, s->storages.at[storage].kind != ML_STORAGE_TEMPORARY || v->written[storage],
                    "a value is read before it is written");
        }
        for (int w = 0; w < step->write_count; w++) {
            uint32_t storage = s->values.at[step->values[step->read_count + w]].storage;
            require(v, s->storages.at[storage].kind == ML_STORAGE_TEMPORARY,
                    "an input or state is written");
            v->written[storage] = true;
        }
        if (step->ir != NULL) verify_kernel(v, step);
        if (step->gemm != NULL) verify_gemm(v, step);
        if (step->kind == ML_STEP_COLLECTIVE)
            for (int i = 0; i < 2; i++)
                require(v, is_block(v, step->values[i]),
                        "a collective's operand is not contiguous");
        if (step->kind == ML_STEP_KERNEL) require(v, step->kernel != NULL, "there is no kernel");
        verify_launches(v, step->kernel);
    }
}

void ml_lower_verify(const ml_schedule *s) {
    verifier v = {.s = s};
    v.written = ML_NEW_ARRAY(s->arena, bool, s->storages.count + 1);
    verify_steps(&v);
}
