/* Weights of Hugging Face folders: mlua generate, check and run --from (tests/hf: tiny models). */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

/* The greedy text of the reference, up to 64 tokens, by the model's script inside the binary. */
static void greedy(process_room *room, const char *name, int tokens) {
    process_result r = process_shell(
        room, 0,
        "\"$MLUA\" generate --from \"$ROOT/tests/hf/%s\" --ids 5,3,60,11 --tokens %d --json "
        "--device cpu | tr -d '][ ' >ids && sed -n '/\"greedy\"/,/]/p' "
        "\"$ROOT/tests/hf/%s/expected.json\" | tr -d '][ \\n' | "
        "sed 's/\"greedy\"://; s/,$//' | cut -d, -f1-%d >expected && cmp ids expected && "
        "grep -o , ids | wc -l",
        name, tokens, name, tokens + 4);
    CHECK_EQ_INT(atoi(r.output), tokens + 3);
}

static const char *const families[] = {"gpt2",   "llama",       "mistral",   "qwen2",
                                       "qwen3",  "mixtral",     "qwen3_moe", "gemma2",
                                       "gemma3", "deepseek_v3", "mamba2",    "qwen3_next"};
enum { FAMILIES = sizeof families / sizeof *families };

static void every_greedy(process_room *room) {
    for (int i = 0; i < FAMILIES; i++) greedy(room, families[i], 64);
}

static void write_logits(process_room *room) {
    process_write(
        room, "logits.lua",
        "local cfg = require 'mlua'.config { name = '', variant = 0, gradients = false }\n"
        "dofile(os.getenv 'ROOT' .. '/tests/lua/lib/hf.lua')(cfg.name, { gradients = "
        "cfg.gradients, variant = cfg.variant > 0 and cfg.variant or nil })\n");
}

/* The numbers of variants are counted by the file's own: one more is an error. */
static void every_variant(process_room *room) {
    write_logits(room);
    for (int i = 0; i < FAMILIES; i++) {
        process_result r = process_shell(
            room, 0,
            "sed -n '/\"variants\"/,$p' \"$ROOT/tests/hf/%s/expected.json\" | grep -c '^  {'",
            families[i]);
        const int count = atoi(r.output);
        CHECK(count >= 2);
        for (int v = 1; v <= count; v++)
            process_run(room, 0, "", "run logits.lua name=%s variant=%d --device cpu", families[i],
                        v);
    }
}

static void every_mesh(process_room *room) {
    static const char *const meshes[] = {"", "-n 2 --mesh tp=2", "-n 2 --mesh pp=2",
                                         "-n 2 --mesh ep=2"};
    write_logits(room);
    for (int i = 0; i < FAMILIES; i++) {
        const bool experts = i == 5 || i == 6 || i == 9 || i == 11;
        for (int k = 0; k < (experts ? 4 : 3); k++)
            process_run(room, 0, "", "run logits.lua name=%s gradients=%s %s --device cpu",
                        families[i], k < 2 ? "true" : "false", meshes[k]);
    }
}

PROCESS_TEST(hf_greedy_llama) {
    greedy(room, "llama", 64);
}

PROCESS_TEST(hf_greedy_begins) {
    for (int i = 0; i < FAMILIES; i++) greedy(room, families[i], 2);
}

PROCESS_TEST(hf_greedy_recurrent) {
    greedy(room, "mamba2", 64);
    greedy(room, "qwen3_next", 64);
}

/* All of them, and every altered configuration of each (tests/hf/NAME/expected.json). */
TEST(long, hf_greedy) {
    process_in_room(every_greedy);
}

TEST(long, hf_variants) {
    process_in_room(every_variant);
}

TEST(long, hf_gradients_and_ranks) {
    process_in_room(every_mesh);
}

/* Headers alone are compared, and what does not fit has its name. */
PROCESS_TEST(hf_refusals) {
    process_result r = process_run(
        room, 1, "", "check \"$ROOT/models/llama.lua\" --from \"$ROOT/tests/hf/llama\" ffn=64");
    process_expect(&r, "6 tensors have another shape");
    process_expect(&r, "model.layers.1.mlp.down_proj.weight is [32, 48] in the file, and [32, 64] "
                       "by blocks.2.down f32[ffn=64, embed=32]");
    r = process_run(room, 1, "",
                    "check \"$ROOT/models/llama.lua\" --from \"$ROOT/tests/hf/llama\" layers=1");
    process_expect(&r, "9 tensors are in the file and not in the model");
    r = process_run(room, 1, "",
                    "check \"$ROOT/models/llama.lua\" --from \"$ROOT/tests/hf/llama\" layers=3");
    process_expect(&r, "9 tensors are missing");
    process_expect(&r, "model.layers.2.input_layernorm.weight, for blocks.3.norm1.gain");
    r = process_run(room, 1, "", "check \"$ROOT/models/gpt.lua\" --from \"$ROOT/tests/hf/llama\"");
    process_expect(&r, "this script is no LlamaForCausalLM, which config.json names");
    process_run(room, 0, "",
                "check \"$ROOT/models/llama.lua\" --from \"$ROOT/tests/hf/llama\" seq=16 batch=2");
}

/* Of a file of weights a header is read, before anything is known of it too. */
PROCESS_TEST(hf_headers_alone) {
    process_shell(room, 0,
                  "mkdir large; cp \"$ROOT\"/tests/hf/llama/config.json large; "
                  "truncate -s 2G large/model.safetensors");
    process_result r = process_run(room, 1, "", "check \"$ROOT\"/models/llama.lua --from large");
    process_expect(&r, "large/model.safetensors");
    CHECK(r.peak_bytes < (int64_t)1 << 30);
}

/* Fields that change the mathematics are refused by their names. */
PROCESS_TEST(hf_fields) {
    static const struct {
        const char *field, *message;
    } cases[] = {
        {"\"mlp_bias\": true", "mlp_bias is true, and this model computes with false"},
        {"\"hidden_act\": \"relu\"", "hidden_act is \"relu\", and this model computes with"},
        {"\"logit_scale\": 2.0", "the field logit_scale = 2.0 is not known"},
        {"\"partial_rotary_factor\": 0.5", "partial_rotary_factor is 0.5"},
        {"\"rope_scaling\": {\"rope_type\": \"longrope\"}", "type \"longrope\" is not supported"},
        {"\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2, \"alpha\": 3}",
         "rope_scaling.alpha is not known"},
    };
    process_shell(room, 0, "cp -r \"$ROOT/tests/hf/llama\" l && cp l/config.json config.json");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_write(room, "field", cases[i].field);
        process_shell(room, 0,
                      "{ echo '{'; cat field; echo ','; f=$(cut -d: -f1 field | head -1); "
                      "sed '/\"rope_scaling\"/,/}/d' config.json | grep -v \"^ $f:\" | tail -n +2; "
                      "} >l/config.json");
        process_result r =
            process_run(room, 1, "", "check \"$ROOT/models/llama.lua\" --from l seq=16 batch=2");
        process_expect(&r, cases[i].message);
    }
}

/* Of Mamba-2 and Qwen3-Next: what would change the mathematics; Infinity in both of its spellings
 * is read. */
PROCESS_TEST(hf_fields_of_recurrences) {
    static const struct {
        const char *family, *script, *edit, *message;
    } cases[] = {
        {"mamba2", "mamba", "s/\"use_bias\": false/\"use_bias\": true/",
         "use_bias is true, and this model computes with false"},
        {"mamba2", "mamba", "s/\"hidden_act\": \"silu\"/\"hidden_act\": \"gelu\"/",
         "hidden_act is \"gelu\", and this model computes with"},
        {"mamba2", "mamba", "s/\"chunk_size\"/\"state_norm\"/", "the field state_norm = 8"},
        {"mamba2", "mamba", "s/    *Infinity/{\"__float__\": \"Infinity\"}/", ""},
        {"qwen3_next", "hybrid", "s/\"full_attention_interval\": 2/\"layer_types\": [\"x\"]/",
         "layer_types[0] is \"x\""},
        {"qwen3_next", "hybrid", "s/\"attention_bias\": false/\"attention_bias\": true/",
         "attention_bias is true"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_shell(room, 0,
                      "rm -rf f && cp -r \"$ROOT/tests/hf/%s\" f && sed -i '%s' f/config.json",
                      cases[i].family, cases[i].edit);
        process_result r =
            process_run(room, *cases[i].message != 0, "",
                        "check \"$ROOT/models/%s.lua\" --from f seq=16 batch=2", cases[i].script);
        process_expect(&r, cases[i].message);
    }
}

static void logits(process_room *room, const char *name, const char *mesh) {
    write_logits(room);
    process_run(room, 0, "", "run logits.lua name=%s %s --device cpu", name, mesh);
}

/* A rank reads its part: two ranks' logits, split over heads and over layers. */
DIST_TEST(hf_tensor_parallel) {
    logits(room, "llama", "-n 2 --mesh tp=2");
}

DIST_TEST(hf_stages) {
    logits(room, "gpt2", "-n 2 --mesh pp=2");
}

/* What is written is what was read, to the bit, and reads alike. */
PROCESS_TEST(hf_export) {
    static const char *const names[] = {"gpt2", "mixtral", "mamba2", "qwen3_next"};
    process_write(room, "same.lua",
                  "local m = require 'mlua'\n"
                  "local root, name = os.getenv 'ROOT', m.config { name = '' }.name\n"
                  "local a = m.read_tensors(root .. '/tests/hf/' .. name .. '/model.safetensors')\n"
                  "local b = m.read_tensors(name .. '/model.safetensors')\n"
                  "for key in pairs(b) do assert(a[key], key) end\n"
                  "for key, values in pairs(a) do\n"
                  "  assert(#values == #b[key] and values:dims()[1] == b[key]:dims()[1], key)\n"
                  "  for i = 1, #values do assert(values[i] == b[key][i], key) end\n"
                  "end\n");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        process_result r = process_run(
            room, 0, "", "export \"$ROOT/tests/hf/%s\" %s --hf --device cpu", names[i], names[i]);
        process_expect(&r, "tensors of f32 in 1 file");
        process_run(room, 0, "", "run same.lua name=%s --device cpu", names[i]);
        process_shell(room, 0,
                      "\"$MLUA\" export %s %s-again --hf --device cpu && "
                      "cmp %s/model.safetensors %s-again/model.safetensors && "
                      "cmp %s/config.json %s-again/config.json && test -s "
                      "%s/generation_config.json",
                      names[i], names[i], names[i], names[i], names[i], names[i], names[i]);
    }
    process_result r = process_run(room, 1, "", "export \"$ROOT/tests/hf/gpt2\" gpt2 --hf");
    process_expect(&r, "gpt2 holds files already");
}
