/* The layouts under which whole models are trained beside one rank, a line for each: a name, the
 * models, how many ranks, a Lua expression and, where two layers will not do, how many. */
#ifndef ML_TESTS_DIST_LAYOUTS_H
#define ML_TESTS_DIST_LAYOUTS_H

typedef enum { GPT, LLAMA, GPT_MOE, MODELS } model_kind;
typedef enum { DENSE = 1 << GPT | 1 << LLAMA, EXPERTS = 1 << GPT_MOE } models;
enum { LAYERS = 2, MOST_LAYERS = 8 };
static const char *const model_names[MODELS] = {"gpt", "llama", "gpt_moe"};

typedef struct {
    const char *name;
    models models;
    int ranks;
    const char *layout; /* a Lua expression */
    int layers;         /* 0: LAYERS */
} layout_case;

#define TP "'heads', 'kv_heads', 'ffn', 'vocab'"
static const layout_case cases[] = {
    {"dp2", DENSE | EXPERTS, 2, "m.layout.ddp { dp = 2 }"},
    {"dp4", DENSE, 4, "m.layout.ddp { dp = 4 }"},
    {"dp8", DENSE, 8, "m.layout.ddp { dp = 8 }"},
    {"zero1 dp2", DENSE, 2, "m.layout.ddp { dp = 2, zero = true }"},
    {"zero1 dp2 of the optimizer alone", DENSE, 2,
     "m.layout { mesh = { {'dp', 2} }, acts = { dp = {'batch'} }, state = { dp = 'flat' } }"},
    {"dp2 tp2 sp zero1 kept", DENSE, 4,
     "m.layout.megatron { dp = 2, tp = 2, sp = true, zero = true, reshard = false }"},
    {"zero1 dp4", DENSE | EXPERTS, 4, "m.layout.ddp { dp = 4, zero = true }"},
    {"zero1 dp8", DENSE, 8, "m.layout.ddp { dp = 8, zero = true }"},
    {"fsdp2", DENSE, 2, "m.layout.fsdp { dp = 2 }"},
    {"fsdp4", DENSE | EXPERTS, 4, "m.layout.fsdp { dp = 4 }"},
    {"fsdp8", DENSE, 8, "m.layout.fsdp { dp = 8 }"},
    {"fsdp2 kept", DENSE, 2, "m.layout.fsdp { dp = 2, reshard = false }"},
    {"fsdp4 kept", DENSE | EXPERTS, 4, "m.layout.fsdp { dp = 4, reshard = false }"},
    {"fsdp2 tp2 sp kept", DENSE, 4, "m.layout.fsdp { dp = 2, tp = 2, sp = true, reshard = false }"},
    {"tp2", DENSE, 2, "m.layout.megatron { tp = 2 }"},
    {"tp4", DENSE, 4, "m.layout.megatron { tp = 4 }"},
    {"tp2 sp", DENSE | EXPERTS, 2, "m.layout.megatron { tp = 2, sp = true }"},
    {"tp4 sp", DENSE, 4, "m.layout.megatron { tp = 4, sp = true }"},
    {"tp2 sp kept", DENSE | EXPERTS, 2, "m.layout.megatron { tp = 2, sp = true, reshard = false }"},
    {"cp2 kept", DENSE, 2, "m.layout.megatron { cp = 2, reshard = false }"},
    {"dp4 tp2 sp zero1", DENSE, 8, "m.layout.megatron { dp = 4, tp = 2, sp = true, zero = true }"},
    {"dp2 tp2", DENSE, 4, "m.layout.megatron { dp = 2, tp = 2 }"},
    {"dp4 tp2", DENSE, 8, "m.layout.megatron { dp = 4, tp = 2 }"},
    {"dp2 tp4 sp", DENSE, 8, "m.layout.megatron { dp = 2, tp = 4, sp = true }"},
    {"dp2 tp2 sp zero1", DENSE, 4, "m.layout.megatron { dp = 2, tp = 2, sp = true, zero = true }"},
    {"dp4 tp2 zero1", DENSE, 8, "m.layout.megatron { dp = 4, tp = 2, zero = true }"},
    {"fsdp2 tp2", DENSE, 4, "m.layout.fsdp { dp = 2, tp = 2 }"},
    {"fsdp4 tp2 sp", DENSE, 8, "m.layout.fsdp { dp = 4, tp = 2, sp = true }"},
    {"cp2 gathered", DENSE | EXPERTS, 2, "m.layout.megatron { cp = 2 }"},
    {"cp4 gathered", DENSE, 4, "m.layout.megatron { cp = 4 }"},
    {"cp2 exchanged", DENSE, 2, "m.layout.megatron { cp = 2, context = 'exchanged' }"},
    {"cp4 exchanged", DENSE, 4, "m.layout.megatron { cp = 4, context = 'exchanged' }"},
    {"cp2 ring", DENSE, 2, "m.layout.megatron { cp = 2, context = 'ring' }"},
    {"cp4 ring", DENSE, 4, "m.layout.megatron { cp = 4, context = 'ring' }"},
    {"dp2 cp2", DENSE, 4, "m.layout.megatron { dp = 2, cp = 2 }"},
    {"dp2 cp2 exchanged tp2", DENSE, 8,
     "m.layout.megatron { dp = 2, cp = 2, tp = 2, context = 'exchanged' }"},
    {"dp2 cp2 ring zero1", DENSE, 4,
     "m.layout.megatron { dp = 2, cp = 2, context = 'ring', zero = true }"},
    {"dp2 cp2 ring tp2", DENSE, 8,
     "m.layout.megatron { dp = 2, cp = 2, tp = 2, context = 'ring' }"},
    {"dp2 cp2 tp2 sp", DENSE, 8, "m.layout.megatron { dp = 2, cp = 2, tp = 2, sp = true }"},
    {"fsdp2 cp2 tp2", DENSE, 8, "m.layout.fsdp { dp = 2, cp = 2, tp = 2 }"},
    {"dp2 over two mesh axes", DENSE, 4,
     "m.layout { mesh = { {'a', 2}, {'b', 2} }, acts = { a = {'batch'}, b = {'batch'} } }"},
    {"hybrid: fsdp2 in dp2", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'fsdp', 2} }, params = { fsdp = {'embed'} }, "
     "acts = { dp = {'batch'}, fsdp = {'batch'} } }"},
    {"hybrid with zero1", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'fsdp', 2} }, params = { fsdp = {'embed'} }, "
     "acts = { dp = {'batch'}, fsdp = {'batch'} }, state = { dp = 'flat' } }"},
    {"tp2 outside of dp2", DENSE, 4,
     "m.layout { mesh = { {'tp', 2}, {'dp', 2} }, params = { tp = {" TP "} }, "
     "acts = { tp = {" TP "}, dp = {'batch'} } }"},
    {"tp2 outside of zero1 dp2", DENSE, 4,
     "m.layout { mesh = { {'tp', 2}, {'dp', 2} }, params = { tp = {" TP "} }, "
     "acts = { tp = {" TP "}, dp = {'batch'} }, state = { dp = 'flat' } }"},
    {"flat over dp and cp", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'cp', 2} }, acts = { dp = {'batch'}, cp = {'seq'} }, "
     "state = { dp = 'flat', cp = 'flat' } }"},
    {"vocab alone", DENSE, 4,
     "m.layout { mesh = { {'tp', 4} }, params = { tp = {'vocab'} }, acts = { tp = {'vocab'} } }"},
    {"ffn alone", DENSE, 4,
     "m.layout { mesh = { {'tp', 4} }, params = { tp = {'ffn'} }, acts = { tp = {'ffn'} } }"},
    {"embed split too", DENSE, 2,
     "m.layout { mesh = { {'x', 2} }, params = { x = {'embed'} }, acts = { x = {'embed'} } }"},
    {"embed over two mesh axes", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'x', 2} }, params = { dp = {'embed'}, x = {'embed'} }, "
     "acts = { dp = {'batch'}, x = {'batch'} } }"},
    {"seq of data parallel ranks", DENSE, 2,
     "m.layout { mesh = { {'dp', 2} }, acts = { dp = {'seq', 'batch'} } }"},
    {"parameters split, activations not", DENSE, 2,
     "m.layout { mesh = { {'x', 2} }, params = { x = {" TP "} } }"},
    {"all ranks alike", DENSE | EXPERTS, 2, "m.layout { mesh = { {'x', 2} } }"},
    {"ep2", EXPERTS, 2, "m.layout.megatron { ep = 2 }"},
    {"ep4 zero1", EXPERTS, 4, "m.layout.megatron { ep = 4, zero = true }"},
    {"dp2 ep2 fsdp", EXPERTS, 4, "m.layout.fsdp { dp = 2, ep = 2 }"},
    {"dp2 ep2 zero1", EXPERTS, 4, "m.layout.megatron { dp = 2, ep = 2, zero = true }"},
    {"ep2 tp2", EXPERTS, 4, "m.layout.megatron { ep = 2, tp = 2 }"},
    {"ep4 tp2 sp", EXPERTS, 8, "m.layout.megatron { ep = 4, tp = 2, sp = true }"},
    {"ep2 cp2", EXPERTS, 4, "m.layout.megatron { ep = 2, cp = 2 }"},
    {"ep2 rows sent", EXPERTS, 2, "m.layout.megatron { ep = 2, exchange = 2 }"},
    {"ep2 rows without a place", EXPERTS, 2, "m.layout.megatron { ep = 2, exchange = 0.75 }"},
    {"ep4 tp2 sp rows sent", EXPERTS, 8,
     "m.layout.megatron { ep = 4, tp = 2, sp = true, exchange = 4 }"},
    {"dp2 ep2 fsdp rows sent", EXPERTS, 4, "m.layout.fsdp { dp = 2, ep = 2, exchange = 2 }"},
    {"pp2 ep2 rows sent", EXPERTS, 4,
     "m.layout.megatron { pp = 2, ep = 2, exchange = 2, microbatches = 2 }"},
    {"pp2 ep2 rows without a place", EXPERTS, 4,
     "m.layout.megatron { pp = 2, ep = 2, exchange = 1.05, microbatches = 2 }"},
    {"pp2 ep2 at once, rows without a place", EXPERTS, 4,
     "m.layout.megatron { pp = 2, ep = 2, exchange = 1, microbatches = 1 }"},
    {"pp2 ep2 interleaved, rows without a place", EXPERTS, 4,
     "m.layout.megatron { pp = 2, ep = 2, exchange = 1, schedule = 'interleaved', "
     "microbatches = 4 }",
     4},
    {"pp2 ep2 zero-bubble zero1, rows without a place", EXPERTS, 4,
     "m.layout.megatron { pp = 2, ep = 2, zero = true, exchange = 1, schedule = 'zero-bubble', "
     "microbatches = 4 }"},
    {"pp2 dp2 ep2 fsdp, rows without a place", EXPERTS, 8,
     "m.layout.fsdp { pp = 2, dp = 2, ep = 2, exchange = 1, microbatches = 2 }"},
    {"pp2 ep4 rows without a place", EXPERTS, 8,
     "m.layout.megatron { pp = 2, ep = 4, exchange = 1.5, microbatches = 2 }"},
    {"experts over dp", EXPERTS, 2,
     "m.layout { mesh = { {'dp', 2} }, params = { dp = {'experts'} }, "
     "acts = { dp = {'batch', 'experts'} } }"},
    {"experts over tp", EXPERTS, 2,
     "m.layout { mesh = { {'tp', 2} }, params = { tp = {'experts', 'heads', 'vocab'} }, "
     "acts = { tp = {'experts', 'heads', 'vocab'} } }"},
    {"pp2", DENSE | EXPERTS, 2, "m.layout.megatron { pp = 2, microbatches = 2 }"},
    {"pp2 at once", DENSE, 2, "m.layout.megatron { pp = 2, microbatches = 1 }"},
    {"pp4", DENSE, 4, "m.layout.megatron { pp = 4, microbatches = 4 }", 4},
    {"pp4 of 7 layers", DENSE, 4, "m.layout.megatron { pp = 4, microbatches = 8 }", 7},
    {"pp2 of 7 layers", DENSE, 2, "m.layout.megatron { pp = 2, microbatches = 4 }", 7},
    {"pp8", DENSE, 8, "m.layout.megatron { pp = 8, microbatches = 8 }", 8},
    {"pp2 interleaved", DENSE | EXPERTS, 2,
     "m.layout.megatron { pp = 2, schedule = 'interleaved', microbatches = 4 }", 4},
    {"pp4 interleaved dp2", DENSE, 8,
     "m.layout.megatron { pp = 4, dp = 2, schedule = 'interleaved', microbatches = 4 }", 8},
    {"pp2 three chunks", DENSE, 2,
     "m.layout.megatron { pp = 2, schedule = 'interleaved', chunks = 3, microbatches = 4 }", 7},
    {"pp4 zero-bubble", DENSE, 4,
     "m.layout.megatron { pp = 4, schedule = 'zero-bubble', microbatches = 8 }", 4},
    {"pp2 dp2 zero-bubble zero1", DENSE | EXPERTS, 4,
     "m.layout.megatron { pp = 2, dp = 2, zero = true, schedule = 'zero-bubble', "
     "microbatches = 4 }"},
    {"dp2 tp2 pp2", DENSE, 8, "m.layout.megatron { dp = 2, tp = 2, pp = 2, microbatches = 4 }"},
    {"dp2 tp2 pp2 sp zero1", DENSE, 8,
     "m.layout.megatron { dp = 2, tp = 2, pp = 2, sp = true, zero = true, microbatches = 2 }"},
    {"cp2 pp2 tp2", DENSE, 8, "m.layout.megatron { cp = 2, pp = 2, tp = 2, microbatches = 2 }"},
    {"cp2 ring pp2 tp2 sp", DENSE, 8,
     "m.layout.megatron { cp = 2, context = 'ring', pp = 2, tp = 2, sp = true, "
     "microbatches = 4 }"},
    {"fsdp2 pp2", DENSE | EXPERTS, 4, "m.layout.fsdp { dp = 2, pp = 2, microbatches = 2 }"},
    {"pp2 inside of dp2", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'pp', 2} }, acts = { dp = {'batch'} }, "
     "stages = { pp = 'blocks', microbatches = 4 } }"},
    {"ep2 pp2 tp2", EXPERTS, 8, "m.layout.megatron { ep = 2, pp = 2, tp = 2, microbatches = 2 }"},
};
enum { CASES = sizeof cases / sizeof *cases };

#endif
