-- What PyTorch, NumPy and JAX call things, and how mlua writes them: the help of errors about unknown functions
-- (m.NAME: init.lua) and unknown methods (x:NAME: vm/bindings/tensor.c).
--
-- A row is the names, separated by spaces, and the help. Text in backquotes is code: messages show it without
-- the quotes, and tests/lua/synonyms.lua runs all of it. In it x is f32[batch, seq, embed], y another, w and b are the
-- parameters [embed, ffn] and [ffn], wte is [vocab, embed], ids i32[batch, seq], logits have vocab, q, k and v heads
-- and head_dim, mask is bool[batch, seq], A are the axes, model is a module and Block a class, loss a number. A row
-- with "function", "method" or "module" at its end is of m.NAME, x:NAME or model:NAME alone, as mlua has the others. A name that mlua has is
-- in no other row: a function added under a name listed here replaces its row.
local core = require "mlua.core"

local ROWS = {
  -- Shapes.
  { "view reshape resize rearrange unflatten", [[`x:split("embed", A.heads, A.head_dim)` makes two axes of one, `q:merge("heads", "head_dim", "embed")` one of two]] },
  { "flatten ravel", [[`q:merge("heads", "head_dim", "embed")` makes one axis of two]] },
  { "transpose swapaxes swapdims moveaxis movedim T mT t H adjoint", [[ops find axes by name, in any order: `x:dot(w, "embed")` needs no transpose; `x:rename("seq", "kv_seq")` renames an axis, `x:permute("seq", "batch", "embed")` changes the order in memory alone]] },
  { "squeeze", [[a reduction takes an axis away, also one of size 1: `x:slice("seq", 0, 1):sum("seq")`]] },
  { "unsqueeze expand expand_dims expand_as broadcast_to broadcast_tensors tile repeat_interleave newaxis", [[operands meet by name, without axes of size 1: `x:dot(w, "embed") + b`; `b:broadcast{A.batch, A.seq}` repeats along axes that it lacks]] },
  { "stack", [[`m.concat({x, y}, "seq")` joins tensors along an axis that they have; `x:broadcast{m.axis("part", 1)}` adds one of size 1 to join along]], "method" },
  { "cat concatenate hstack vstack dstack append column_stack", [[`m.concat({x, y}, "seq")` joins tensors along an axis]] },
  { "chunk array_split tensor_split hsplit vsplit split_with_sizes unbind unstack narrow select dynamic_slice", [[`x:slice("seq", 0, 4)` takes the positions 0 to 3 of an axis]] },
  { "index_select take take_along_dim take_along_axis lookup embedding", [[`wte:gather(ids, "vocab")` looks up the elements of an axis at i32 indices]] },
  { "flip fliplr flipud", [[`x:gather(A.seq.size - 1 - m.iota(A.seq), "seq")` reverses an axis]] },
  { "roll", [[`m.concat({x:slice("seq", 1), x:slice("seq", 0, 1)}, "seq")` rolls an axis by one; `x:pad("seq", 1, 0):slice("seq", 0, A.seq.size)` shifts it and fills with 0]] },
  { "unfold max_pool1d max_pool2d MaxPool1d MaxPool2d avg_pool1d avg_pool2d AvgPool1d AvgPool2d", [[`x:split("seq", m.axis("window", 4), m.axis("inner", 2)):max("inner")` pools windows of 2; `:mean("inner")` averages them]] },
  { "shape ndim ndimension dim", [[`x:axes()` lists the names of the axes, `x:size("seq")` is the size of one]] },
  { "numel nelement", [[`x:elements()` is the number of elements]] },
  { "contiguous clone copy deepcopy is_contiguous stride", [[tensors are values, and memory is planned: nothing needs a copy or an order]] },
  -- Products.
  { "einsum matmul mm bmm mv tensordot inner addmm baddbmm vdot dot_general contract", [[`x:dot(w, "embed")` sums products over the named axes; all other axes stay, those of a batch too]] },
  { "ger", [[`m.outer(m.iota(A.seq, "f32"), b)` multiplies each with each]] },
  { "svd qr cholesky eig eigh inv inverse pinv det slogdet solve lstsq matrix_rank fft ifft rfft", [[mlua has products, sums and elementwise ops, no other linear algebra and no Fourier transforms]] },
  -- Layers.
  { "Linear Dense", [[a layer is a parameter and a product: `m.param{A.embed, A.ffn}`, `m.bias{A.ffn}`, then `x:dot(w, "embed") + b`]] },
  { "Embedding", [[the table is a parameter: `m.param{A.vocab, A.embed}`; `wte:gather(ids, "vocab")` looks up]] },
  { "LayerNorm layernorm", [[`m.layer_norm{A.embed}` makes the module that normalises over embed; call it: `m.layer_norm{A.embed}(x)`]] },
  { "RMSNorm", [[`m.rms_norm{A.embed}` makes the module that normalises over embed; call it: `m.rms_norm{A.embed}(x)`]] },
  { "BatchNorm BatchNorm1d BatchNorm2d batch_norm GroupNorm group_norm InstanceNorm instance_norm", [[write it: `(x - x:mean("batch")) * m.rsqrt(x:var("batch") + 1e-5)`; `m.buffer{A.embed}` holds running means]] },
  { "Dropout", [[`m.dropout(x, 0.1)` drops while m.train trains, and nowhere else]] },
  { "MultiheadAttention MultiHeadAttention multi_head_attention scaled_dot_product_attention sdpa dot_product_attention flash_attention flex_attention", [[`m.attention(q, k, v, {causal = true})` attends over seq; q, k and v have the axes heads and head_dim, masks are options]] },
  { "Conv1d Conv2d Conv3d conv1d conv2d conv3d convolution conv_general_dilated causal_conv1d depthwise_conv ConvTranspose2d", [[`m.conv(x, w, {axis = "seq", causal = true})` convolves each channel of both for itself; `m.conv(x, m.param{A.embed, A.ffn, m.axis("width", 3), name = "filter"}, {axis = "seq", over = "embed", taps = "width", padding = "same"})` sums the channels; transposed = true is ConvTranspose]] },
  { "LSTM GRU RNN LSTMCell GRUCell while_loop fori_loop associative_scan", [[`m.scan(function(s, t) local h = m.tanh(s + t); return h, h end, {axis = "seq", state = m.zeros{A.batch, A.embed}, inputs = x})` is a recurrence; `x:cumsum("seq")` is one op]] },
  { "Transformer TransformerEncoder TransformerEncoderLayer TransformerDecoder", [[models/gpt.lua and models/llama.lua are transformers of a page each, to be copied]] },
  { "Module", [[`m.module("Net", function(self) self.w = m.param{A.embed, A.ffn} end)` makes a class; define function Net:forward(x)]] },
  { "ModuleList ModuleDict", [[`m.stack(2, Block)` is a list of modules; any Lua table of modules in a field is part of the model]] },
  { "Sequential", [[a Lua loop: `for _, block in ipairs(m.stack(2, Block)) do x = block(x) end`]] },
  { "Parameter ParameterList parameter", [[`m.param{A.embed, A.ffn}` in a field of a module is a parameter]] },
  { "register_buffer register_parameter Buffer Variable", [[a field of a module is enough: `m.param{A.embed, A.ffn}` is trained, `m.buffer{A.embed}` is set by `:assign`]] },
  { "register_forward_hook register_hook register_full_backward_hook", [[tensors are Lua values: return what you want to see as an output of m.compile]] },
  { "parameters", [[`m.parameters(model)` gives the parameters and, second, their names]], "module" },
  { "requires_grad_", [[`m.freeze(model)` leaves the parameters as they are, `m.freeze(model, false)` has them trained]], "module" },
  { "weight", [[a parameter is itself the tensor: `x:dot(w, "embed")`]], "method" },
  { "named_parameters parameters_to_vector state_dict load_state_dict modules children named_modules", [[`m.parameters(model)` gives the parameters and, second, their names; a parameter's :get() and :set(values) read and write it]] },
  -- Attention masks and choices.
  { "masked_fill masked_fill_ masked_select select_n", [[`m.where(mask, 0, x)` has 0 where the bool mask is true, else x]] },
  { "tril triu causal_mask", [[`m.ge(m.iota(A.seq):broadcast{A.seq, A.kv_seq}, m.iota(A.kv_seq))` is true where the key is not later; m.attention takes {causal = true}]] },
  { "scatter scatter_ scatter_reduce index_add index_add_ index_put index_copy segment_sum put", [[`m.scatter_add(ids, x, A.vocab)` adds the values up at their indices along a new axis; m.where and m.one_hot write single places]] },
  { "nonzero unique masked argwhere", [[sizes are known before values: use a bool mask with `m.where(mask, x, 0)`]] },
  { "bincount histc histogram", [[`m.one_hot(ids, A.vocab):sum("batch", "seq")` counts]] },
  { "multinomial categorical choice", [[`(logits - m.log(-m.log(m.uniform(m.axes_of(logits))))):argmax("vocab")` draws from softmax(logits)]] },
  { "cond switch", [[`m.where(mask, x, y)` chooses for each element; a Lua if chooses while the script is traced]] },
  -- New tensors.
  { "arange range", [[`m.iota(A.seq)` counts 0, 1, 2 ... along an axis]] },
  { "linspace", [[`m.iota(A.seq, "f32") / (A.seq.size - 1)` runs from 0 to 1 along an axis]] },
  { "zeros_like ones_like full_like empty empty_like new_zeros new_ones new_full", [[`m.zeros(m.axes_of(x))` has the axes of x; m.ones and `m.full(m.axes_of(x), 2)` too]] },
  { "randn randn_like normal_ standard_normal gauss", [[`m.normal({A.batch, A.seq})` is standard normal, drawn anew at each step; `m.normal({A.batch, A.seq}, 1)` by a key: equal keys give equal numbers]] },
  { "rand rand_like random random_sample", [[`m.uniform({A.batch, A.seq})` is uniform from 0 to 1, drawn anew at each step; `m.uniform({A.batch, A.seq}, 1)` by a key: equal keys give equal numbers]] },
  { "bernoulli", [[`m.random_mask(m.axes_of(x), 0.15)` is true for that share of the elements]] },
  { "randint randint_like randperm", [[`m.floor(m.uniform({A.batch}) * 10):cast("i32")` draws 0 to 9]] },
  { "manual_seed seed PRNGKey default_rng", [[m.config{seed = 1} or --seed 1 sets the seed of all that is random]] },
  { "eye identity diag", [[`m.one_hot(m.iota(A.seq), A.kv_seq)` is 1 on the diagonal]] },
  { "tensor Tensor array asarray as_tensor from_numpy FloatTensor LongTensor frombuffer", [[programs of m.compile take Lua tables and host arrays as inputs: `m.host("f32", 2, 3)`; `m.full({A.seq}, 0.5)` is a constant]] },
  { "meshgrid", [[`m.iota(A.seq):broadcast{A.seq, A.kv_seq}` has each position of seq for each of kv_seq]] },
  -- Elementwise.
  { "multiply true_divide subtract divide negative addcmul addcdiv", [[operators: `x + y`, `x - y`, `x * y`, `x / y`, `-x`]] },
  { "floor_divide remainder fmod", [[operators: `x // y` and `x % y`]] },
  { "square power", [[`x * x`; `x ^ 3`]] },
  { "reciprocal", [[`1 / x`]] },
  { "absolute fabs", [[`m.abs(x)`]] },
  { "log2 log10 exp2", [[`m.log(x) / math.log(2)`; `m.exp(x * math.log(2))`]] },
  { "sinh cosh tan", [[`m.sin(x) / m.cos(x)`; `(m.exp(x) - m.exp(-x)) / 2`]] },
  { "logaddexp", [[`m.softplus(x - y) + y` is log(exp(x) + exp(y))]] },
  { "clip clip_by_value hardtanh", [[`m.clamp(x, -1, 1)`]] },
  { "clamp_min clamp_max", [[`m.maximum(x, 0)` and `m.minimum(x, 1)`]] },
  { "greater greater_equal less less_equal not_equal equal allclose isclose", [[`m.gt(x, y)`, `m.ge(x, y)`, `m.lt(x, y)`, `m.le(x, y)`, `m.eq(x, y)` and `m.ne(x, y)` give bool tensors]] },
  { "isnan isinf isfinite", [[`m.is_finite(x)`; `m.ne(x, x)` is true for NaN alone]] },
  { "nan_to_num", [[`m.where(m.is_finite(x), x, 0)`]] },
  { "lerp", [[`x + 0.1 * (y - x)`]] },
  { "swish SiLU hardswish", [[`m.silu(x)`]] },
  { "leaky_relu LeakyReLU elu ELU celu selu prelu", [[`m.where(m.gt(x, 0), x, 0.01 * x)`]] },
  { "glu GLU geglu reglu", [[`m.sigmoid(x) * y`; `m.swiglu(x, y)` is silu(x) * y]] },
  { "log_sigmoid logsigmoid logit", [[`-m.softplus(-x)` is log(sigmoid(x))]] },
  -- Reductions.
  { "amax amin nanmax nanmin", [[`x:max("embed")` and `x:min("embed")`; over all axes without a name]] },
  { "max", [[`x:max("embed")` is the largest along axes, `m.maximum(x, y)` takes the larger of two]], "function" },
  { "min", [[`x:min("embed")` is the smallest along axes, `m.minimum(x, y)` takes the smaller of two]], "function" },
  { "sum", [[`x:sum("embed")`; over all axes without a name]], "function" },
  { "average nanmean", [[`x:mean("embed")`]] },
  { "norm vector_norm matrix_norm", [[`m.sqrt((x * x):sum("embed"))`]] },
  { "normalize l2_normalize", [[`x * m.rsqrt((x * x):sum("embed") + 1e-12)`]] },
  { "cosine_similarity CosineSimilarity", [[`x:dot(y, "embed") * m.rsqrt((x * x):sum("embed") * (y * y):sum("embed") + 1e-12)`]] },
  { "prod cumprod product nanprod", [[of positive numbers: `m.exp(m.log(x):sum("embed"))`; along an axis `m.exp(m.log(x):cumsum("embed"))`]] },
  { "any all count_nonzero", [[a bool tensor is 0 and 1 as a number: `mask:cast("f32"):max("seq")` for any, `:min("seq")` for all, `:sum("seq")` to count]] },
  { "argsort", [[`select(2, x:sort("embed"))`: sort gives values and indices]] },
  { "topk", [[`x:top_k("embed", 2, "choice")` gives values and indices along a new axis choice]] },
  { "median quantile percentile kthvalue mode", [[`(x:sort("embed")):slice("embed", 8, 9):sum("embed")` is what stands at place 8]] },
  -- Losses.
  { "CrossEntropyLoss nll_loss NLLLoss softmax_cross_entropy softmax_cross_entropy_with_integer_labels", [[`m.cross_entropy(logits, targets)` gives the sum and the count, which a loss of m.train returns]] },
  { "mse_loss MSELoss squared_error", [[`((x - y) ^ 2):mean()`; m.train's loss returns a sum and a count: `((x - y) ^ 2):sum(), x:elements()`]] },
  { "l1_loss L1Loss", [[`m.abs(x - y):mean()`]] },
  { "smooth_l1_loss SmoothL1Loss huber_loss HuberLoss", [[`m.where(m.lt(m.abs(x - y), 1), 0.5 * (x - y) ^ 2, m.abs(x - y) - 0.5):mean()`]] },
  { "binary_cross_entropy binary_cross_entropy_with_logits BCELoss BCEWithLogitsLoss sigmoid_binary_cross_entropy", [[`(m.softplus(x) - x * y):mean()` for logits x and targets y from 0 to 1]] },
  { "kl_div KLDivLoss", [[`(m.softmax(x, "embed") * (m.log_softmax(x, "embed") - m.log_softmax(y, "embed"))):sum("embed")`]] },
  -- Gradients, optimizers, training.
  { "backward requires_grad retain_grad autograd value_and_grad vjp jvp jacrev jacobian hessian", [[`m.grad(loss, {w, b})` gives the gradients as tensors; m.train needs no call]] },
  { "grad", [[`m.grad(loss, {w, b})` gives the gradients as tensors; a parameter keeps none]], "method" },
  { "zero_grad", [[gradients are values of m.grad, not kept anywhere: nothing is set to zero]] },
  { "no_grad inference_mode enable_grad set_grad_enabled eval", [[gradients are made by m.grad alone; `m.detach(x)` stops one, `m.freeze(model)` leaves parameters as they are]] },
  { "step Optimizer", [[m.train{...} steps; in an own loop `m.adamw{lr = 3e-4}.update({w}, m.grad(loss, {w}), {rate = 1, step = 1})` inside of m.compile]] },
  { "Adam adam AdamW Adafactor adafactor adagrad Adagrad RMSprop rmsprop NAdam", [[`m.adamw{lr = 3e-4}`; Adam is `m.adamw{lr = 3e-4, weight_decay = 0}`; others are written with m.optimizer]] },
  { "SGD momentum", [[`m.sgd{lr = 0.1, momentum = 0.9}`]] },
  { "lr_scheduler LambdaLR StepLR CosineAnnealingLR LinearLR OneCycleLR cosine_decay warmup_cosine_decay_schedule get_cosine_schedule_with_warmup", [[`m.cosine{warmup = 100}` in m.train{schedule = ...}; any function(step, steps) that gives a factor is a schedule]] },
  { "clip_grad_norm clip_grad_norm_ clip_grad_value_ clip_by_global_norm", [[m.train{clip = 1.0} bounds the norm of all gradients]] },
  { "DataLoader Dataset TensorDataset load_dataset", [[m.train{data = "FILE"} reads text, or tokens of u16 from FILE.bin; own loops fill host arrays: `m.host("i32", 4, 8)`]] },
  { "GradScaler autocast amp mixed_precision set_default_dtype", [[on a GPU products run in bf16 with f32 master weights; --dtype f32 changes that]] },
  -- Checkpoints.
  { "checkpoint save_checkpoint load_checkpoint savez save_file load_file save_pretrained from_pretrained", [[m.save(DIR, { model, optimizer }) saves states by name, m.load(DIR, { model, optimizer }) loads them under any layout; m.read_tensors(FILE) reads safetensors]] },
  -- Values, dtypes, devices.
  { "item tolist numpy get block_until_ready", [[a tensor has no value while the script runs; a program has: `m.compile(function(i) return i.x:sum() end, {x = {A.seq}}){x = 1}`]] },
  { "data copy_ set_ fill_ zero_", [[a parameter's :get() copies its values, :set(values) replaces them, :assign(value) inside of a program]] },
  { "type astype type_as float half bfloat16 double int long short bool byte float32 float16 float64 int32 int64 int8 uint8 f32 f64 bf16 i32 i64", [[a dtype is a text: `x:cast("bf16")`; `m.zeros({A.seq}, "i32")`; there are bool, i32, i64, bf16, f16, f32 and f64]] },
  { "to", [[`x:cast("bf16")` converts; the device of all tensors is chosen on the command line: --device cuda]] },
  { "cuda cpu device device_put is_cuda pin_memory is_available get_device", [[all tensors are on one device, chosen on the command line: --device cuda]] },
  -- Compilation and ranks.
  { "jit script trace", [[`m.compile(function(i) return i.x * 2 end, {x = {A.seq}})` is a program; m.train compiles its own]] },
  { "vmap pmap shard_map xmap", [[ops keep the axes that they do not name, so all of them work on batches; ranks are for m.layout]] },
  { "remat", [[what the backward pass computes again is planned by the compiler, for memory and time]] },
  { "DataParallel DistributedDataParallel DDP FullyShardedDataParallel FSDP fully_shard", [[`m.layout.ddp{}` or `m.layout.fsdp{}` in m.train{layout = ...}; --mesh dp=8 gives the size]] },
  { "init_process_group all_reduce all_gather reduce_scatter all_to_all barrier psum pmean", [[the compiler inserts collectives where the layout (m.layout) needs them; -n starts ranks]] },
  { "DeviceMesh PartitionSpec NamedSharding with_sharding_constraint distribute_tensor", [[`m.layout{mesh = {{"dp", 1}}, acts = {dp = {"batch"}}}` says how axes are split; `x:on{dp = {"batch"}}` one tensor]] },
}

-- Options by other names: the names, the option that a function must have for the help to fit, and the help.
local OPTIONS = {
  { "requires_grad trainable", "frozen", "frozen = true leaves it as it is" },
  { "initializer init_std init_fn std initial", "init", "init = 0.02 is a standard deviation, init = m.init.uniform(0.1) a function" },
  { "betas", "beta1", "beta1 = 0.9, beta2 = 0.95" },
  { "learning_rate", "lr", "lr = 3e-4" },
  { "wd decay l2", "weight_decay", "weight_decay = 0.1" },
  { "epsilon variance_epsilon", "eps", "eps = 1e-5" },
  { "elementwise_affine affine", "gain", "gain = false leaves the gain out" },
  { "params parameters", "lr", "m.train gives an optimizer its parameters, or optimizer.update does" },
  { "warmup_steps num_warmup_steps warmup_iters warm_up", "warmup", "warmup = 100, in steps" },
  { "min_lr lr_min eta_min end_value", "final", "final = 0.1, a factor of the optimizer's lr" },
  { "T_max total_steps max_steps num_steps decay_steps num_training_steps steps", "warmup", "m.train gives a schedule the number of its steps" },
  { "lr learning_rate weight_decay betas", "optimizer", "it is the optimizer's: optimizer = m.adamw{lr = 3e-4, weight_decay = 0.1}" },
  { "epochs num_epochs max_epochs max_steps num_steps max_iters iterations", "steps", "steps = 1000 optimizer steps; epochs are not counted" },
  { "batch_size train_batch_size", "batch", "batch = A.batch, an axis" },
  { "seq_len seq_length block_size context_length max_length", "seq", "seq = A.seq, an axis" },
  { "gradient_accumulation_steps grad_accum accumulation_steps accumulate_grad_batches", "accum", "accum = 4 microbatches" },
  { "grad_clip max_grad_norm gradient_clip clip_grad gradient_clip_val", "clip", "clip = 1.0 bounds the gradient norm" },
  { "warmup warmup_steps", "schedule", "it is the schedule's: schedule = m.cosine{warmup = 100}" },
  { "scheduler lr_scheduler lr_schedule", "schedule", "schedule = m.cosine{warmup = 100}" },
  { "criterion loss_fn", "loss", "loss = function(tokens, targets) ... return sum, count end" },
  { "dataset dataloader train_data train_loader", "data", 'data = "FILE", text or .bin of u16 tokens' },
  { "callback callbacks hooks", "on_step", "on_step = function(step, outputs) ... end" },
  { "eval_interval eval_steps", "eval_every", "eval_every = 100 steps" },
  { "log_interval logging_steps", "log_every", "log_every = 10 steps" },
  { "vocab_size num_classes", "vocab", "the vocabulary's size is that of the axis vocab of the logits" },
  { "mask attn_mask attention_mask key_padding_mask bias", "score", "score = function(s, i) return m.where(m.le(i.k, i.q), s, -math.huge) end is a mask; causal, window and document are usual ones" },
  { "sliding_window window_size", "window", "window = 256 keys" },
  { "softmax_scale sm_scale", "scale", "scale = 1 / math.sqrt(64)" },
  { "dropout dropout_p", "score", "attention drops no weights; m.dropout(x, 0.1) drops what it gives" },
  { "num_heads n_heads nheads", "heads", 'heads = "heads" names the axis; its size is that of q' },
  { "num_experts n_experts", "experts", "experts = A.experts, an axis" },
  { "k num_experts_per_tok experts_per_token", "top_k", "top_k = 2" },
  { "capacity_factor", "capacity", "capacity = 1.25" },
  { "aux_loss_coef router_aux_loss_coef load_balancing", "aux_loss", "aux_loss = 0.01" },
  { "approximate", "exact", "the tanh form is what there is by default; exact = true takes the error function" },
  { "ignore_index", "ignore", "ignore = -1" },
  { "reduction", "ignore", "the loss is given as a sum and a count, which m.train divides" },
  { "dim", "axis", 'axis = "vocab"' },
  { "groups feature_group_count", "taps", "groups are an axis of the tensor and of the filter that over does not list: split the channels first" },
  { "kernel kernel_size filter_size", "taps", "the filter's axis says how many taps there are: m.axis(\"width\", 4)" },
  { "bias", "taps", "add it: m.conv(x, w, options) + bias" },
  { "strides window_strides", "stride", "stride = 2" },
  { "pad", "padding", "padding = 1 at both ends, or {before, after}" },
  { "max_new_tokens max_tokens", "tokens", "tokens = 200" },
  { "fullgraph mode dynamic backend", "often", "there is nothing to choose: the whole function is compiled, for the sizes of its axes" },
}

-- Settings and axes by other names: the names, and what models/*.lua call it. The help where the script has that one.
local SETTINGS = {
  { "d_model hidden_size n_embd dim hidden width model_dim embed_dim embedding_dim emb", "embed" },
  { "n_layers num_layers n_layer num_hidden_layers depth", "layers" },
  { "n_heads num_heads n_head num_attention_heads nheads", "heads" }, { "n_kv_heads num_kv_heads num_key_value_heads", "kv_heads" },
  { "d_ff hidden_dim intermediate_size mlp_dim ffn_dim", "ffn" }, { "d_head head_size dim_head", "head_dim" },
  { "seq_len seq_length block_size context_length max_length n_ctx length time T", "seq" }, { "batch_size bs B N", "batch" },
  { "vocab_size n_vocab V", "vocab" }, { "learning_rate", "lr" }, { "epochs num_steps max_steps max_iters iterations", "steps" },
  { "num_experts n_experts", "experts" }, { "warmup_steps warmup_iters", "warmup" }, { "weight_decay wd", "decay" },
  { "gradient_accumulation_steps grad_accum accumulation_steps", "accum" }, { "grad_clip max_grad_norm", "clip" },
}

-- Tables of functions elsewhere: all of mlua's are in one.
local NAMESPACES = "nn functional F optim torch np numpy jnp jax lax linalg utils distributed special lr_scheduler losses einops"

local help, own, namespaces = {}, { ["function"] = {}, method = {}, module = {} }, {}
for _, row in ipairs(ROWS) do
  local text = row[2]:gsub("`", "")
  for name in row[1]:gmatch "%S+" do (own[row[3]] or help)[name] = text end
end
for name in NAMESPACES:gmatch "%S+" do namespaces[name] = true end

local synonyms = { rows = ROWS, options = OPTIONS }

---The setting or axis that is probably meant, of those that there are; nil for none.
---@param name string
---@param known string[]
---@return string?
function synonyms.setting(name, known)
  for _, row in ipairs(SETTINGS) do
    if (" " .. row[1] .. " "):find(" " .. name .. " ", 1, true) then
      for _, other in ipairs(known) do
        if other == row[2] then return other end
      end
    end
  end
  return core.suggest(name, known)
end

-- Of the methods that modules have elsewhere, those that no module of a script asks for by accident.
local MODULE_METHODS = " parameters named_parameters state_dict load_state_dict zero_grad children modules named_modules "
  .. "register_buffer register_parameter requires_grad_ to cuda cpu half bfloat16 "

---What mlua writes for a method of other libraries' modules; nil for other names.
---@param name string
---@return string?
function synonyms.for_module(name)
  return MODULE_METHODS:find(" " .. name .. " ", 1, true) and (help[name] or own.module[name]) or nil
end

---What mlua writes for a name of another library; nil for other names.
---@param name string
---@return string?
function synonyms.help(name) return help[name] end

---The help of the error that a function has no option `name`, where the option has another name; nil elsewhere.
---@param name string
---@param known string[] the options that there are
---@return string?
function synonyms.for_option(name, known)
  local has = {}
  for _, option in ipairs(known) do has[option] = true end
  for _, row in ipairs(OPTIONS) do
    if has[row[2]] and (" " .. row[1] .. " "):find(" " .. name .. " ", 1, true) then return row[3] end
  end
end

local EVERYTHING = "mlua editor prints all functions and methods, with their docs"

-- Whether two names differ by one letter more, less or other, or by two neighbours in another order.
local function one_edit(a, b)
  a, b = a:lower(), b:lower()
  if #a > #b then a, b = b, a end
  local i = 1
  while i <= #a and a:byte(i) == b:byte(i) do i = i + 1 end
  return a:sub(i) == b:sub(i + 1) or #a == #b and (a:sub(i + 1) == b:sub(i + 1)
    or a:sub(i, i + 1) == b:sub(i, i + 1):reverse() and a:sub(i + 2) == b:sub(i + 2))
end

-- The help for a name that is misspelt: one of the known names, which `format` completes, or one of the rows.
local function near(name, known, format)
  local guess = core.suggest(name, known)
  if not guess or not one_edit(name, guess) then
    for other, text in pairs(help) do
      if one_edit(name, other) and #name > 3 then return other .. ": " .. text end
    end
  end
  return guess and ("did you mean %s?"):format(format:format(guess))
end

---The help of the error that m has no function `name`.
---@param name string
---@param m table
---@return string
function synonyms.for_function(name, m)
  if help[name] or own["function"][name] then return help[name] or own["function"][name] end
  if namespaces[name] then return "mlua's functions are all in one table: m.softmax, m.layer_norm, m.adamw" end
  if core.tensor_methods[name] then return ("it is a method of tensors: x:%s(...)"):format(name) end
  local known = {}
  for key in pairs(m) do known[#known + 1] = key end
  return near(name, known, "m.%s") or EVERYTHING
end

---The help of the error that tensors have no method `name`.
---@param name string
---@param known string[] the methods that there are
---@return string
function synonyms.for_method(name, known)
  if help[name] or own.method[name] then return help[name] or own.method[name] end
  local m = package.loaded["mlua"]
  if m and rawget(m, name) ~= nil then return ("it is a function: m.%s(x, ...)"):format(name) end
  local op = name:match "^(.+)_$" -- as PyTorch calls what changes its tensor
  if op and (core.tensor_methods[op] or help[op]) then
    return "tensors are values, and no op changes one: " .. (help[op] or ("x = x:%s(...)"):format(op))
  end
  return near(name, known, "%s") or EVERYTHING
end

---The value of m.nn and m.nn.functional: raises for each name that is looked up in it. nil for other names.
---@param name string
---@param fail fun(path: string, name: string)
---@return table?
function synonyms.namespace(name, fail)
  if not namespaces[name] then return nil end
  local function within(path)
    return setmetatable({}, {
      __index = function(_, key)
        local longer = path .. "." .. tostring(key)
        if namespaces[key] then return within(longer) end
        fail(longer, tostring(key))
      end,
      __call = function() fail(path, path) end,
    })
  end
  return within(name)
end

core.set_method_help(synonyms.for_method)
return synonyms
