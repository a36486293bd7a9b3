---@meta mlua
-- Written by `mlua editor` from the program's own tables: do not edit.

---@class Axis
---@field name string
---@field size integer

---A dtype and named axes. It has no value while the script runs.
---
---Elementwise operands match by the names of their axes: one has all axes of the others.
---
---Dtypes: floats of several (bf16, f32, f64) are promoted to the widest. Integers, bools and floats do not mix:
---t:cast(dtype) converts. A Lua number takes the dtype of the tensor beside it (an integer tensor takes integers
---alone); where all operands are numbers it is i32 or i64 if they are integers, else f32. Forward functions read
---parameters in the compute dtype (m.compute_dtype); p:read() gives the stored f32. Sums and products accumulate
---in f32 or wider.
---@class Tensor
---@operator add(Tensor|number): Tensor
---@operator sub(Tensor|number): Tensor
---@operator mul(Tensor|number): Tensor
---@operator div(Tensor|number): Tensor
---@operator idiv(Tensor|number): Tensor
---@operator mod(Tensor|number): Tensor
---@operator pow(Tensor|number): Tensor
---@operator unm: Tensor
local Tensor = {}

---the absolute value of a; its slope at 0 is 0
---@return Tensor
function Tensor:abs() end

---a + b
---@param b Tensor|number
---@return Tensor
function Tensor:add(b) end

---the i32 index of the largest along an axis; the first of equals
---@param axis Axis|string
---@return Tensor
function Tensor:argmax(axis) end

---The i32 index of the smallest along an axis; the first of equals.
---@param axis Axis|string
---@return Tensor
function Tensor:argmin(axis) end

---the names of the axes, in memory order
---@return string[]
function Tensor:axes() end

---repeated along the listed axes that it lacks; these are in the listed order, its other axes before them
---@param axes Axis[]
---@return Tensor
function Tensor:broadcast(axes) end

---the tensor converted to another dtype: bool, i32, i64, bf16, f32, f64; floats become integers towards zero, NaN 0, and what does not fit the nearest that does
---@param dtype string
---@return Tensor
function Tensor:cast(dtype) end

---the smallest integer not below a
---@return Tensor
function Tensor:ceil() end

---x limited to low .. high; its slope is 1 there, at low and high too, and 0 outside.
---@param low number|Tensor
---@param high number|Tensor
---@return Tensor
function Tensor:clamp(low, high) end

---the cosine of a, in radians
---@return Tensor
function Tensor:cos() end

---running sums along an axis
---@param axis Axis|string
---@param options? {reverse: boolean}
---@return Tensor
function Tensor:cumsum(axis, options) end

---x through which no gradient flows.
---@return Tensor
function Tensor:detach() end

---a / b
---@param b Tensor|number
---@return Tensor
function Tensor:div(b) end

---the sum of products over the named axes; accumulates in f32 or wider. Operands that are f32 by default (inputs, random draws) are rounded to the compute dtype; x:cast("f32"), dtype="f32" in an input's spec or here, and state:read() keep f32
---@param other Tensor
---@param ... Axis|string|{dtype: string}
---@return Tensor
function Tensor:dot(other, ...) end

---Zero each element with probability `rate` and scale the others by 1 / (1 - rate), while training;
---x itself elsewhere, unless `always` is set. What is dropped of a sample does not depend on the microbatches that the
---batch is cut into; of a tensor without the batch's axis all of them drop the same. For masks that a loss draws there is
---m.random_mask.
---@param rate number 0 .. 1
---@param options? {always: boolean} always: in evaluation and sampling too
---@return Tensor
function Tensor:dropout(rate, options) end

---the name of the element type
---@return string
function Tensor:dtype() end

---the number of elements
---@return integer
function Tensor:elements() end

---whether a equals b
---@param b Tensor|number
---@return Tensor
function Tensor:eq(b) end

---the error function of a
---@return Tensor
function Tensor:erf() end

---e to the power a
---@return Tensor
function Tensor:exp() end

---exp(a) - 1, also of small a to the last digit
---@return Tensor
function Tensor:expm1() end

---the largest integer not above a
---@return Tensor
function Tensor:floor() end

---elements along an axis at the i32 indices, 0 to its size - 1: a program that is fed others is an error before it runs; computed ones outside give 0
---@param index Tensor
---@param axis Axis|string
---@return Tensor
function Tensor:gather(index, axis) end

---whether a is at least b
---@param b Tensor|number
---@return Tensor
function Tensor:ge(b) end

---The Gaussian error linear unit (Hendrycks and Gimpel 2016), in the tanh form that GPT-2 uses;
---`{exact=true}` takes the error function.
---@param options? {exact: boolean}
---@return Tensor
function Tensor:gelu(options) end

---whether a is greater than b
---@param b Tensor|number
---@return Tensor
function Tensor:gt(b) end

---whether it has an axis
---@param axis Axis|string
---@return boolean
function Tensor:has(axis) end

---a / b rounded towards minus infinity; 0 for integers by 0
---@param b Tensor|number
---@return Tensor
function Tensor:idiv(b) end

---whether a is neither infinite nor NaN
---@return Tensor
function Tensor:is_finite() end

---whether a is at most b
---@param b Tensor|number
---@return Tensor
function Tensor:le(b) end

---the natural logarithm of a
---@return Tensor
function Tensor:log() end

---log(1 + a), also of small a to the last digit
---@return Tensor
function Tensor:log1p() end

---x - logsumexp(x) over the named axes.
---@param ... Axis|string
---@return Tensor
function Tensor:log_softmax(...) end

---whether a and b are both true
---@param b Tensor|number
---@return Tensor
function Tensor:logical_and(b) end

---whether a is false
---@return Tensor
function Tensor:logical_not() end

---whether a or b is true
---@param b Tensor|number
---@return Tensor
function Tensor:logical_or(b) end

---log(sum(exp(x))) over the named axes, without overflow: -inf, without a gradient, where all elements are
--- -inf. The result is at least f32.
---@param ... Axis|string
---@return Tensor
function Tensor:logsumexp(...) end

---whether a is less than b
---@param b Tensor|number
---@return Tensor
function Tensor:lt(b) end

---the largest over the named axes; over all axes when none is named
---@param ... Axis|string
---@return Tensor
function Tensor:max(...) end

---the larger of a and b; NaN if either is; equal ones share the gradient
---@param b Tensor|number
---@return Tensor
function Tensor:maximum(b) end

---The mean over the named axes (over all axes when none is named). Accumulated in f32 or wider.
---@param ... Axis|string
---@return Tensor
function Tensor:mean(...) end

---two axes as one: index = outer * inner size + inner
---@param outer Axis|string
---@param inner Axis|string
---@param merged Axis|string
---@return Tensor
function Tensor:merge(outer, inner, merged) end

---the smallest over the named axes; over all axes when none is named
---@param ... Axis|string
---@return Tensor
function Tensor:min(...) end

---the smaller of a and b; NaN if either is; equal ones share the gradient
---@param b Tensor|number
---@return Tensor
function Tensor:minimum(b) end

---a - b * (a // b): has the sign of b; 0 for integers by 0
---@param b Tensor|number
---@return Tensor
function Tensor:mod(b) end

---a * b
---@param b Tensor|number
---@return Tensor
function Tensor:mul(b) end

---whether a differs from b
---@param b Tensor|number
---@return Tensor
function Tensor:ne(b) end

----a
---@return Tensor
function Tensor:neg() end

---the same tensor, split over each listed mesh axis along the first of the axes, whole where the list is empty: t:on{tp={"seq"}, dp={}} overrides the layout's tables for this tensor and its gradient; without a layout it does nothing
---@param axes table<string, (Axis|string)[]>
---@return Tensor
function Tensor:on(axes) end

---1 where the index equals the position along the new axis, else 0. A program that is fed an index outside of the axis is an
---error before it runs; computed ones give zeros.
---@param axis Axis the new axis
---@param dtype? string default "f32"
---@return Tensor
function Tensor:one_hot(axis, dtype) end

---zeros before and after along an axis
---@param axis Axis|string
---@param before integer
---@param after? integer
---@return Tensor
function Tensor:pad(axis, before, after) end

---the same elements with the axes in another memory order
---@param ... Axis|string
---@return Tensor
function Tensor:permute(...) end

---a to the power b; the slope in a of a^0 is 0, and that in b of 0^b where b >= 0
---@param b Tensor|number
---@return Tensor
function Tensor:pow(b) end

---each row times the matrix of the group that it belongs to: group e of `other` has the rows starts[e] .. ends[e]-1; groups ascend and do not overlap; rows of none give 0
---@param other Tensor
---@param over Axis|string
---@param starts Tensor
---@param ends Tensor
---@return Tensor
function Tensor:ragged_dot(other, over, starts, ends) end

---max(x, 0), whose slope at 0 is 0 (that of m.maximum would be 1/2).
---@return Tensor
function Tensor:relu() end

---the same elements under other axis names: t:rename("seq", "kv_seq") or t:rename{seq="kv_seq"}
---@param old Axis|string|table
---@param new? Axis|string
---@return Tensor
function Tensor:rename(old, new) end

---a rounded to the nearest integer, ties to even
---@return Tensor
function Tensor:round() end

---1 / sqrt(a)
---@return Tensor
function Tensor:rsqrt() end

---1 / (1 + exp(-a))
---@return Tensor
function Tensor:sigmoid() end

---1 or -1 as a is positive or negative; a itself where it is zero or NaN
---@return Tensor
function Tensor:sign() end

---x * sigmoid(x) (also called swish).
---@return Tensor
function Tensor:silu() end

---the sine of a, in radians
---@return Tensor
function Tensor:sin() end

---the size of an axis
---@param axis Axis|string
---@return integer
function Tensor:size(axis) end

---the elements start .. stop-1 along an axis, counted from 0; negative counts from the end
---@param axis Axis|string
---@param start? integer
---@param stop? integer
---@return Tensor
function Tensor:slice(axis, start, stop) end

---exp(x) / sum(exp(x)) over the named axes.
---@param ... Axis|string
---@return Tensor
function Tensor:softmax(...) end

---log(1 + exp(x)), without overflow and to the last digits on both sides; log(sigmoid(x)) is -softplus(-x).
---@return Tensor
function Tensor:softplus() end

---sorted along an axis, stable; gives values and i32 indices
---@param axis Axis|string
---@param options? {descending: boolean}
---@return Tensor
---@return Tensor
function Tensor:sort(axis, options) end

---one axis as two: index = outer * inner size + inner
---@param axis Axis|string
---@param outer Axis
---@param inner Axis
---@return Tensor
function Tensor:split(axis, outer, inner) end

---the square root of a
---@return Tensor
function Tensor:sqrt() end

---The standard deviation over the named axes: the root of m.var. Where all elements are equal it is 0 and has no
---gradient.
---@param ... Axis|string
---@return Tensor
function Tensor:std(...) end

---a, through which no gradient flows
---@return Tensor
function Tensor:stop_gradient() end

---a - b
---@param b Tensor|number
---@return Tensor
function Tensor:sub(b) end

---the sum over the named axes; over all axes when none is named
---@param ... Axis|string
---@return Tensor
function Tensor:sum(...) end

---the hyperbolic tangent of a
---@return Tensor
function Tensor:tanh() end

---the k largest along an axis, largest first; gives values and i32 indices
---@param axis Axis|string
---@param k integer
---@param new_axis? Axis|string
---@return Tensor
---@return Tensor
function Tensor:top_k(axis, k, new_axis) end

---The variance over the named axes (divided by n, not n-1).
---@param ... Axis|string
---@return Tensor
function Tensor:var(...) end

---b where a is true, c elsewhere
---@param b Tensor|number
---@param c Tensor|number
---@return Tensor
function Tensor:where(b, c) end

---@class State: Tensor
local State = {}

---the value from the end of the step on
---@param value Tensor|number
function State:assign(value) end

---the number of elements
---@return integer
function State:elements() end

---a copy of the value in host memory
---@return Host
function State:get() end

---parameter, optimizer, gradient or other
---@return string
function State:kind() end

---the name: the key of checkpoints and randomness
---@return string?
function State:name() end

---the value at the start of the step, in the stored dtype
---@return Tensor
function State:read() end

---replace the value; the values have the state's dimensions, or those of the axes that are listed, all of the state's in any order: p:set(tensors["up.weight"], {A.ffn, A.embed})
---@param values Host|table|number
---@param axes? (Axis|string)[]
function State:set(values, axes) end

---the value before the first step
---@param value Tensor|number
function State:set_init(value) end

---name the state; names are unique
---@param name string
function State:set_name(name) end

---@class Host
---@field [integer] number
local Host = {}

---the dimensions
---@return integer[]
function Host:dims() end

---the name of the element type
---@return string
function Host:dtype() end

---set all elements: to one value, from a flat list, or from a nested one or another host array of these dimensions
---@param values number|boolean|table|Host
---@return Host
function Host:fill(values) end

---a copy with other dimensions: the same elements in row-major order
---@param ... integer
---@return Host
function Host:reshape(...) end

---set an element, counted from 1 in row-major order
---@param i integer
---@param value number|boolean
function Host:set(i, value) end

---the elements as a flat list
---@return table
function Host:table() end

---@class Program
---@overload fun(inputs: table): table<string, number|Host>
local Program = {}

---the share of a step in which pipeline ranks wait: measured, as predicted from measured times of tasks and messages, planned; nil before step 9 and without a pipeline
---@return number?
---@return number?
---@return number?
function Program:bubble() end

---the second half: waits and gives the outputs; no other program may run in between
---@return table
function Program:finish() end

---the name
---@return string?
function Program:name() end

---what was planned
---@return Plan
function Program:plan() end

---the first half of a call: enqueues the work and returns while it runs; inputs may be reused
---@param inputs? table
function Program:start(inputs) end

---@class Corpus
local Corpus = {}

---draw the windows of a batch and the tokens that follow: samples skip + step * rows and on, the same for the same seed (default: that of all randomness, --seed); from and to are shares of the corpus between 0 and 1
---@param inputs Host
---@param targets Host
---@param step integer
---@param options? {seed: integer, from: number, to: number, vocab: integer, skip: integer}
---@return Corpus
function Corpus:fill(inputs, targets, step, options) end

---the file
---@return string
function Corpus:name() end

---the number of tokens
---@return integer
function Corpus:size() end

---the text of token ids
---@param ids Host|integer[]
---@return string
function Corpus:text(ids) end

---What was planned for a program.
---@class Plan
---@field flops number of one run
---@field peak_bytes integer the most memory of a rank, with states
---@field arena_bytes integer of it, what lives during a run alone
---@field kinds table<string, integer> bytes at the peak by kind: parameters, gradients, optimizer, activations, workspace, ...
---@field seconds number that making the program took
---@field idle string[] mesh axes whose ranks all do the same work

---What m.layout makes; its fields are those that it was given, and may be changed before it is used.
---@class Layout: LayoutOptions

---@class LayoutOptions
---@field mesh table[] {{"dp", 4}, {"tp", 2}}: the axes of the mesh and their sizes, outermost first
---@field params? table<string, string[]> by mesh axis: axes along which parameters are split, in order
---@field acts? table<string, string[]> likewise for all other tensors
---@field state? table<string, string> {dp = "flat"}: optimizer states are split over dp (ZeRO-1)
---@field reshard? table<string, boolean> {dp = false}: what is gathered over dp is kept for the backward pass
---@field stages? {schedule: string, chunks: integer, microbatches: integer, [string]: string} pipeline stages: {pp = "layers"}
---@field exchange? number room for the tokens of experts, as a factor of an even share; 0: weights are gathered

---@class LayoutPreset
---@field pp? integer stages
---@field dp? integer ranks over which the batch is split
---@field cp? integer ranks over which seq is split
---@field tp? integer ranks over which heads, ffn and vocab are split
---@field ep? integer|boolean ranks over which experts are split
---@field sp? boolean activations between tensor-parallel parts are split over seq too
---@field zero? boolean optimizer states, and without stages parameters, are split over dp
---@field context? string "gathered", "ring" or "exchanged": how cp splits attention
---@field reshard? boolean false: what the forward pass gathers is kept for the backward pass
---@field exchange? number as in m.layout
---@field schedule? string "1f1b", "interleaved" or "zero-bubble"
---@field chunks? integer stages a rank, of "interleaved"
---@field microbatches? integer into how many a step is cut by the stages

---What is known of a parameter beside its value.
---@class ParameterAttributes
---@field axes Axis[]
---@field init fun(axes: Axis[], key: integer): Tensor
---@field decay boolean whether weight decay applies
---@field named? string the name, once it has one
---@field frozen? boolean

---An instance of a class of m.module. Calling it runs its function forward. Its fields are those that `build` and
---forward functions set; pairs gives them in the order in which they were set.
---@class Module
---@operator call: any
---@field forward fun(self: Module, ...): any

---A mixture of experts, of m.moe.
---@class MoE: Module
---@field router State
---@field gate State|false
---@field up State
---@field down State
---@field statistics fun(self: MoE): {load: number[], peak: number, dropped: number} how evenly the last training step used the experts: each one's share of all choices, the largest share over the even one, and the share of choices that found no room

---What a rule of m.optimizer gets as `t`.
---@class RuleTerms
---@field lr Tensor the learning rate of this step, f32 without axes: the schedule's factor times the option lr
---@field step Tensor the step, f32 without axes, from 1
---@field decay number the option weight_decay; 0 where the parameter is exempt
---@field options table the options, with those of the parameter's group
---@field parameter State the parameter itself

---What m.adamw{...} and other constructors of m.optimizer give.
---@class Optimizer
---@field name string "adamw"
---@field lr number the base rate, which schedules multiply
---@field options table all options
---@field update fun(parameters: State[], gradients: Tensor[], t: {rate: Tensor|number, step: Tensor|number}) assign new values to the parameters, in a program: rate is the schedule's factor, step an f32 scalar from 1

---What m.train takes. steps, data, accum and seed default to the settings of those names in m.config.
---@class TrainOptions
---@field model Module what is trained; model(tokens) gives logits over batch, seq and vocab
---@field loss? fun(tokens: Tensor, targets: Tensor): Tensor, Tensor|number a sum and a count, instead of the logits' cross-entropy
---@field batch Axis of the whole step
---@field seq Axis positions
---@field optimizer? Optimizer default m.adamw{}
---@field schedule? fun(step: integer, steps: integer): number a factor of the optimizer's lr; default m.constant()
---@field steps? integer default 100
---@field data? string|Corpus a text file, or .bin of u16 tokens; default: the text built in
---@field vocab? integer what tokens are held against; default: the size of the logits' vocab
---@field accum? integer microbatches of a step; default 1
---@field clip? number bound of the gradient norm; default 1, 0: off
---@field eval_every? integer steps between evaluations; 0: none
---@field eval_batches? integer of an evaluation; default 8
---@field eval_share? number of the data, its end, that evaluations use and training does not; default 0.1
---@field log_every? integer steps between lines
---@field seed? integer of the order of the data
---@field skip? integer samples before the first; default: those that the model has seen of these data, 0 in its first training
---@field on_step? fun(step: integer, outputs: StepOutputs) called after each step
---@field layout? Layout where tensors lie

---What on_step gets.
---@class StepOutputs
---@field loss number
---@field grad_norm number before clipping
---@field aux_loss? number what modules add (m.add_loss)

---What m.train returns; under mlua check all fields are nil.
---@class TrainResult
---@field loss? number of the last step
---@field eval_loss? number of the last evaluation
---@field steps? integer

---@class mlua
local m = {}

---the absolute value of a; its slope at 0 is 0
---@param a Tensor|number
---@return Tensor
function m.abs(a) end

---Adam with decoupled weight decay (Loshchilov and Hutter 2017).
---@param options? {lr: number, beta1: number, beta2: number, eps: number, weight_decay: number, groups: fun(name: string, p: State): table?}
---@return Optimizer
function m.adamw(options) end

---a + b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.add(a, b) end

---Add a loss of a module's own, such as the balance loss of a router, to that of the program being
---traced: m.train minimizes the mean of its loss plus sum / count for each, and reports the latter as
---aux_loss. `count` is what the sum is over (tokens); outside of a program it does nothing. Over microbatches (accum, pipeline
---stages) those means are averaged as the loss is: where it counts more positions in some, a run says so.
---@param sum Tensor f32
---@param count number|Tensor
function m.add_loss(sum, count) end

---What m.add_loss was given so far in this program, as a sum over `count` items, to be added to a loss
---that is one; nil where nothing was added. Also the sum of what each was multiplied by.
---@param count number|Tensor
---@return Tensor?
---@return Tensor|number?
function m.added_loss(count) end

---The i32 index of the smallest along an axis; the first of equals.
---@param x Tensor
---@param axis Axis|string
---@return Tensor
function m.argmin(x, axis) end

---softmax(scale * q k, masked) v over the axis `seq` of k and v. k and v may have `kv_heads` in
---place of `heads` (grouped-query attention: query head h reads head h // (heads // kv_heads)).
---options: `causal`; `window` (a query sees the last `window` keys); `scale` (default
---1/sqrt(head_dim)); `document` (an i32 tensor over batch and seq: only equal ids see each other);
---`score = function(s, i)`, traced and compiled into the kernel, where s is the scaled score and
---i.batch, i.head, i.q, i.k are indices; `m.where(shown, s, -math.huge)` is a mask, and a GPU skips
---blocks that it hides. k and v may be longer or shorter than q when their axis is called `kv_seq`;
---then causal and window count from the end: the last query sees the last key.
---`seq`, `heads` and `head_dim` name q's axes where they are called something else; without heads
---there is one.
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param options? {causal: boolean, window: integer, scale: number, score: function, document: Tensor, seq: string, heads: string, head_dim: string}
---@return Tensor
function m.attention(q, k, v, options) end

---What is known of a parameter beside its value; an empty table for other states.
---@param p State
---@return ParameterAttributes
function m.attributes(p) end

---Named axes with sizes.
---@param sizes table<string, integer>
---@return table<string, Axis>
function m.axes(sizes) end

---The axes of a tensor, as Axis objects in its order.
---@param x Tensor
---@return Axis[]
function m.axes_of(x) end

---an axis: a name and a size
---@param name string
---@param size integer
---@return Axis
function m.axis(name, size) end

---A bias: a parameter that is zero at first and exempt from weight decay, unless the options of
---m.param say otherwise.
---@param spec {init: any, decay: boolean, frozen: boolean, name: string, [integer]: Axis}
---@return State
function m.bias(spec) end

---A state of a module that forward passes assign and no gradient changes, such as a running mean:
---named as parameters are, kept in checkpoints, no parameter. `init` as for m.param (default zeros). Assigned at each
---microbatch of a step (accum, pipeline stages); m.step_total is for what a step assigns once.
---@param spec {init: any, name: string, [integer]: Axis}
---@return State
function m.buffer(spec) end

---the smallest integer not below a
---@param a Tensor|number
---@return Tensor
function m.ceil(a) end

---Raise where a batch cannot be cut into `parts` microbatches, or a microbatch not over the ranks that share it.
---@param batch Axis
---@param seq Axis
---@param parts integer what m.microbatches gives
---@param accum integer
function m.check_batch(batch, seq, parts, accum) end

---Raise where the layout that a program has been given lists an axis that is not there, also not in what the program
---computes, and looks like another: after the program has been traced, for forward functions make axes too.
function m.check_layout() end

---Raise for a key of `options` that `known` does not list, with a did-you-mean.
---@param what string the function, for the message
---@param options? table
---@param known string[]
---@param listed? string what the list part of the table holds, where it has one
function m.check_options(what, options, known, listed) end

---Raise where x is no tensor.
---@param what string the function, for the message
---@param x any
---@param role? string what x is there, such as "logits"
function m.check_tensor(what, x, role) end

---x limited to low .. high; its slope is 1 there, at low and high too, and 0 outside.
---@param x Tensor
---@param low number|Tensor
---@param high number|Tensor
---@return Tensor
function m.clamp(x, low, high) end

---Trace `fn(inputs)` once and compile it. `inputs` gives each input's axes and dtype:
---{tokens = {A.batch, A.seq, dtype="i32"}, lr = {}} (default dtype f32, which products round to the compute dtype unless
---the spec says dtype="f32"). fn gets a table of tensors
---and returns a tensor or a table of named tensors; states that it assigns are updated at each run.
---Calling the result with {tokens = Host or table, lr = 0.1} runs it and gives numbers (for tensors
---without axes) and Hosts. What it is fed has the input's dimensions; a table may also be a flat list, and a number fills all. options: `name`; `training` (dropout is active and, with an input `step`
---of dtype i64, differs at each step); `layout` of all programs and states (m.layout);
---`microbatches`: a step is so many calls of start and one of finish, which a pipeline overlaps; `often`: it runs many
---times before anything sets the parameters, as sampling does: what it makes of them alone is kept where memory allows.
---@param fn fun(inputs: table<string, Tensor>): Tensor|table<string, Tensor>
---@param inputs? table<string, table>
---@param options? {name: string, training: boolean, layout: table, microbatches: integer, often: boolean}
---@return Program
function m.compile(fn, inputs, options) end

---the dtype in which forward functions read parameters and products run; sets it where one is given
---@param dtype? string
---@return string
function m.compute_dtype(dtype) end

---Tensors one after another along an axis.
---@param tensors Tensor[]
---@param axis Axis|string
---@return Tensor
function m.concat(tensors, axis) end

---Declare the script's settings with their defaults. `key=value` on the command line overrides one;
---`preset=NAME` first applies the table NAME of `presets`. A value has the type of its default. The
---result raises on unknown keys. A script has one m.config: each key of the command line must be in it.
---@param defaults table settings; `presets` is a table of tables of settings
---@return table
function m.config(defaults) end

---Warm-up over `warmup` steps, then constant.
---@param options? {warmup: integer}
---@return fun(step: integer, steps: integer): number
function m.constant(options) end

---a file of text, a token a byte, or one called .bin of u16 tokens; what is neither is refused, unless the dtype (u8 or u16) says to take it; without a path the text that is built in
---@param path? string
---@param options? {dtype: string}
---@return Corpus
function m.corpus(path, options) end

---the cosine of a, in radians
---@param a Tensor|number
---@return Tensor
function m.cos(a) end

---Warm-up, then half a cosine down to `final` (a factor, default 0.1) (Loshchilov and Hutter 2016).
---@param options? {warmup: integer, final: number}
---@return fun(step: integer, steps: integer): number
function m.cosine(options) end

---Cross-entropy between logits and target ids, as a sum over all positions and the number of
---positions that count. `label_smoothing` mixes the target with the uniform distribution (Szegedy
---et al. 2015); `z_loss` adds z_loss * logsumexp^2 (Chowdhery et al. 2022); positions whose target
---is `ignore` (default -1) count for nothing; a program that is fed other targets outside of the axis is an error before it
---runs. Targets have all axes of the logits but `axis`; those that they
---lack are named by `broadcast`, such as {"samples"}: all logits along them are held against the same targets,
---and each counts.
---@param logits Tensor with axis `axis`
---@param targets Tensor i32, the other axes of logits
---@param options? {axis: Axis|string, label_smoothing: number, z_loss: number, ignore: integer, broadcast: (Axis|string)[]}
---@return Tensor sum f32
---@return Tensor count f32
function m.cross_entropy(logits, targets, options) end

---x through which no gradient flows.
---@param x Tensor
---@return Tensor
function m.detach(x) end

---a / b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.div(a, b) end

---Zero each element with probability `rate` and scale the others by 1 / (1 - rate), while training;
---x itself elsewhere, unless `always` is set. What is dropped of a sample does not depend on the microbatches that the
---batch is cut into; of a tensor without the batch's axis all of them drop the same. For masks that a loss draws there is
---m.random_mask.
---@param x Tensor
---@param rate number 0 .. 1
---@param options? {always: boolean} always: in evaluation and sampling too
---@return Tensor
function m.dropout(x, rate, options) end

---whether a equals b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.eq(a, b) end

---the error function of a
---@param a Tensor|number
---@return Tensor
function m.erf(a) end

---e to the power a
---@param a Tensor|number
---@return Tensor
function m.exp(a) end

---exp(a) - 1, also of small a to the last digit
---@param a Tensor|number
---@return Tensor
function m.expm1(a) end

---Assign the totals of a step that is one program (m.compile does).
function m.finish_totals() end

---the largest integer not above a
---@param a Tensor|number
---@return Tensor
function m.floor(a) end

---Leave a parameter, or all that a module has now, as they are from now on: m.parameters and m.train pass
---over them. `frozen=false` has them trained again. Adapters beside given weights: m.freeze(model), then
---add layers to it.
---@param x State|Module
---@param frozen? boolean default true
---@return State|Module x
function m.freeze(x, frozen) end

---a tensor with one value everywhere; f32 where no dtype is given
---@param axes Axis[]
---@param value number|boolean|Tensor
---@param dtype? string
---@return Tensor
function m.full(axes, value, dtype) end

---whether a is at least b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.ge(a, b) end

---The Gaussian error linear unit (Hendrycks and Gimpel 2016), in the tanh form that GPT-2 uses;
---`{exact=true}` takes the error function.
---@param x Tensor
---@param options? {exact: boolean}
---@return Tensor
function m.gelu(x, options) end

---Continue `prompt` (text, for models over bytes; or a list of token ids) by `tokens` tokens drawn
---at `temperature` (0: always the likeliest). The model reads a window of `seq` tokens each time.
---Prints text as it comes unless `quiet`; gives the list of all token ids and the text.
---@param model Module
---@param options {prompt: string|integer[], tokens: integer, temperature: number, seq: Axis, seed: integer, quiet: boolean}
---@return integer[] ids
---@return string text
function m.generate(model, options) end

---The gradients of a scalar with respect to tensors or states; zeros where it does not depend on them. Where
---`xs` are parameters, it is an error if it depends on none of them.
---@param loss Tensor
---@param xs (Tensor|State)[]
---@return Tensor[]
function m.grad(loss, xs) end

---whether a is greater than b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.gt(a, b) end

---a 64-bit hash of a text, the same everywhere
---@param text string
---@return integer
function m.hash(text) end

---a typed array of zeros in host memory, with these dimensions
---@param dtype string
---@param ... integer
---@return Host
function m.host(dtype, ...) end

---a / b rounded towards minus infinity; 0 for integers by 0
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.idiv(a, b) end

---Initial values, for `init` of m.param: functions of a parameter's axes and key. Your own is such a function
---too: init = function(axes, key) return m.uniform(axes, key) * 2 - 1 end; equal keys give equal numbers.
m.init = {}

---This value everywhere.
---@param value number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.constant(value) end

---Normal with this standard deviation.
---@param std number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.normal(std) end

---Uniform in -bound .. bound.
---@param bound number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.uniform(bound) end

---a tensor that the caller of a program provides
---@param name string
---@param axes Axis[]
---@param dtype? string
---@return Tensor
function m.input(name, axes, dtype) end

---0, 1, 2, ... along an axis; i32 where no dtype is given
---@param axis Axis
---@param dtype? string
---@return Tensor
function m.iota(axis, dtype) end

---Whether x is a class of m.module.
---@param x any
---@return boolean
function m.is_class(x) end

---whether a is neither infinite nor NaN
---@param a Tensor|number
---@return Tensor
function m.is_finite(a) end

---Whether x is an instance of a module.
---@param x any
---@return boolean
function m.is_module(x) end

---Layer normalisation over the axes, with gain and bias (Ba, Kiros and Hinton 2016).
---@param spec {eps: number, bias: boolean, [integer]: Axis}
---@return Module
function m.layer_norm(spec) end

---Where tensors lie: {mesh = {{"dp", 4}, {"tp", 2}}, params = , acts = , state = , stages = }. For
---each mesh axis `params` and `acts` list axes in order; a tensor is split over the mesh axis along
---the first that it has. state = {dp = "flat"} splits optimizer states over dp. reshard =
---{dp = false} keeps what the forward pass gathers over dp for the backward pass; with both, parameters
---lie in parts too from one step to the next. stages =
---{pp = "layers", schedule = "1f1b", microbatches = 16} deals the layers of the model (its longest
---list of modules, or the list of that name) to the ranks of pp. --mesh gives sizes.
---exchange = 1.5 has ranks send one another the tokens of m.moe's experts that no capacity bounds,
---with room for 1.5 times an even share, instead of gathering the experts' weights; a step that needs
---more is done again with gathered weights.
---m.layout.megatron, .fsdp and .ddp make usual ones.
---@overload fun(options: LayoutOptions): Layout
m.layout = {}

---Data parallel; `zero` splits optimizer states too (ZeRO-1) and, from one step to the next, parameters:
---they are gathered ahead of use, in the dtype that is computed in, and live until the backward pass is
---done with them. `sp`, `schedule` and `reshard` are for scripts that take a preset by its name: here
---there is nothing for them to change.
---@param options? LayoutPreset dp and zero of it
---@return Layout
function m.layout.ddp(options) end

---Megatron's, with the parameters split over dp along embed too: gathered ahead of use, in the
---backward pass again. With reshard = false the gathered ones are kept until then: less is sent, and
---in bf16 where that is what is computed in.
---@param options? LayoutPreset
---@return Layout
function m.layout.fsdp(options) end

---Megatron's: tensor parallel over heads, ffn and vocab; `sp` splits activations between them over
---seq too; `zero` splits optimizer states over dp (ZeRO-1) and, without stages, parameters from one
---step to the next: they are gathered ahead of use; `context` is how cp splits attention: "gathered"
---(default), "ring" or "exchanged" (all-to-all). With `ep` the mesh has an axis ep that splits experts,
---and the batch elsewhere; `exchange` as in m.layout; `reshard` = false keeps what the forward pass
---gathers over dp, cp and tp for the backward pass, for memory. `schedule` ("1f1b",
---"interleaved" with `chunks` stages a rank, "zero-bubble") and `microbatches` are those of the
---stages that pp makes.
---@param options? LayoutPreset
---@return Layout
function m.layout.megatron(options) end

---whether a is at most b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.le(a, b) end

---Warm-up, then linear decay to `final` (a factor, default 0).
---@param options? {warmup: integer, final: number}
---@return fun(step: integer, steps: integer): number
function m.linear(options) end

---Lion: the sign of an interpolated momentum (Chen et al. 2023).
---@param options? {lr: number, beta1: number, beta2: number, weight_decay: number, groups: fun(name: string, p: State): table?}
---@return Optimizer
function m.lion(options) end

---the natural logarithm of a
---@param a Tensor|number
---@return Tensor
function m.log(a) end

---log(1 + a), also of small a to the last digit
---@param a Tensor|number
---@return Tensor
function m.log1p(a) end

---x - logsumexp(x) over the named axes.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.log_softmax(x, ...) end

---whether a and b are both true
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.logical_and(a, b) end

---whether a is false
---@param a Tensor|number
---@return Tensor
function m.logical_not(a) end

---whether a or b is true
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.logical_or(a, b) end

---log(sum(exp(x))) over the named axes, without overflow: -inf, without a gradient, where all elements are
--- -inf. The result is at least f32.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.logsumexp(x, ...) end

---logsumexp as two terms: log(sum(exp(x - largest))) and the largest element. What is near the latter is best subtracted from
---it alone, since the sum of both is rounded to the spacing of numbers of its size.
---@param x Tensor
---@param ... Axis|string
---@return Tensor log
---@return Tensor largest
function m.logsumexp_parts(x, ...) end

---whether a is less than b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.lt(a, b) end

---the larger of a and b; NaN if either is; equal ones share the gradient
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.maximum(a, b) end

---The mean over the named axes (over all axes when none is named). Accumulated in f32 or wider.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.mean(x, ...) end

---Into how many microbatches m.train cuts a batch: `accum` times the layout's microbatches; where
---the layout has stages and gives none, accum if it is more than 1, else two for each rank.
---@param accum integer
---@return integer
function m.microbatches(accum) end

---the smaller of a and b; NaN if either is; equal ones share the gradient
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.minimum(a, b) end

---a - b * (a // b): has the sign of b; 0 for integers by 0
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.mod(a, b) end

---A class of modules. `build(self, ...)` makes the fields of an instance; define `:forward(...)` on
---the class, and call the instance to run it.
---@param name string
---@param build fun(self: Module, ...)
---@return fun(...): Module class calling it makes an instance
function m.module(name, build) end

---A mixture of experts over the axis `embed` of its input. options: `experts` and `ffn` (axes);
---`top_k` experts for each token (default 2); `router`: "softmax", or "sigmoid" (DeepSeek-V3);
---`normalize` the chosen weights to sum to 1 (default: where top_k > 1), times `scale`; `aux_loss`:
---weight of the balance loss E * sum(f_e P_e) (Fedus et al. 2021), over each sequence (default) or
---`aux_over = "batch"` (each microbatch); `z_loss`: weight of logsumexp(logits)^2 (Zoph et al. 2022); `bias_balance`:
---step of a bias for choosing that evens the load without a loss (Wang et al. 2024); `capacity`: a
---factor, beyond which an expert drops tokens (default: none are dropped); `shared` experts that see
---every token; `expert`: "swiglu" or "gelu"; `seq`: the axis of positions; `init` and `down_init`:
---standard deviations. The router computes in f32. :statistics() returns the last training step's
---load.
---@param spec {experts: Axis, ffn: Axis, top_k: integer, router: string, normalize: boolean, scale: number, aux_loss: number, aux_over: string, z_loss: number, bias_balance: number, capacity: number, shared: integer, expert: string, seq: string, init: number, down_init: number, [integer]: Axis}
---@return MoE
function m.moe(spec) end

---a * b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.mul(a, b) end

---Muon: orthogonalized momentum for matrices (Jordan et al. 2024), scaled to AdamW's update size (Liu
---et al. 2025) so that both share one rate; AdamW for vectors and for tensors with a vocab axis.
---@param options? {lr: number, momentum: number, beta1: number, beta2: number, eps: number, weight_decay: number, groups: fun(name: string, p: State): table?}
---@return Optimizer
function m.muon(options) end

---Name what forward functions have made while a program was traced, such as layers that wait for their first
---input (m.compile does).
---@param list State[]
function m.name_made(list) end

---Name a parameter and give it the initial values that its name determines, if it has none yet.
---@param p State
---@param name string
function m.name_parameter(p, name) end

---whether a differs from b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.ne(a, b) end

----a
---@param a Tensor|number
---@return Tensor
function m.neg(a) end

---Standard normal. Without a key as m.uniform.
---@param axes Axis[]
---@param key? integer|Tensor an i64; equal keys give equal numbers
---@return Tensor
function m.normal(axes, key) end

---1 where the index equals the position along the new axis, else 0. A program that is fed an index outside of the axis is an
---error before it runs; computed ones give zeros.
---@param index Tensor i32
---@param axis Axis the new axis
---@param dtype? string default "f32"
---@return Tensor
function m.one_hot(index, axis, dtype) end

---A tensor full of ones.
---@param axes Axis[]
---@param dtype? string default "f32"
---@return Tensor
function m.ones(axes, dtype) end

---Make an optimizer's constructor from its defaults and rule. All take `lr`, `weight_decay` and
---`groups = function(name, p)`, which returns option overrides for a parameter, or nil. rule(p, g, s, t) gives the
---new value of the parameter p from its gradient g (both f32); s.NAME reads a slot, a state of p's axes that is
---zero at first, and assigning it sets its value for the next step.
---@param name string
---@param defaults table options and their defaults
---@param rule fun(p: Tensor, g: Tensor, s: table<string, Tensor>, t: RuleTerms): Tensor
---@return fun(options?: table): Optimizer
function m.optimizer(name, defaults, rule) end

---The parameters, none of `known` and none frozen, to which gradients of `loss` flow; with `made` only those that
---forward functions have made.
---@param loss Tensor
---@param known State[]
---@param made? boolean
---@return State[]
---@return string[] names of the classes of the models that hold them; "" where none does
function m.other_parameters(loss, known, made) end

---A parameter: an f32 tensor that training changes; a forward function reads it in the compute
---dtype. `init` is a standard deviation, "zeros", "ones" or a function of (axes, key); by default
---normal with 0.02 for two or more axes, zeros for fewer. `decay=false` exempts it from weight
---decay (default: parameters of fewer than two axes are exempt). `frozen=true` makes one that m.train
---leaves as it is, such as the weights that an adapter is added to. `name` names a parameter that no
---module holds.
---@param spec {init: any, decay: boolean, frozen: boolean, name: string, [integer]: Axis}
---@return State
function m.param(spec) end

---The parameters of a module that training changes, in the order of the tree; their names in the second
---list. `frozen=true` lists the frozen ones too.
---@param model Module
---@param options? {frozen: boolean}
---@return State[] parameters
---@return string[] names
function m.parameters(model, options) end

---a to the power b; the slope in a of a^0 is 0, and that in b of 0^b where b >= 0
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.pow(a, b) end

---One setting divided by another, which must divide it: m.quotient(cfg, "embed", "heads").
---@param cfg table what m.config gives
---@param whole string the name of a setting
---@param by string the name of another
---@return integer
function m.quotient(cfg, whole, by) end

---True for a share of the elements, drawn as m.uniform draws without a key: also in evaluation, where m.dropout drops
---nothing. A loss draws by it which tokens it hides: m.random_mask(m.axes_of(tokens), 0.15).
---@param axes Axis[]
---@param share number|Tensor the probability, 0 .. 1; a tensor has some of the axes
---@return Tensor bool
function m.random_mask(axes, share) end

---This process's rank, from 0, and how many there are (-n, or the cluster's launcher). All ranks run the whole
---script: what it prints itself, it prints on each. if m.rank() == 0 then print(...) end
---@return integer rank
---@return integer ranks
function m.rank() end

---The tensors of a safetensors file, by name, as host arrays of the file's dtypes and shapes; F16 becomes f32.
---@param path string
---@return table<string, Host>
function m.read_tensors(path) end

---max(x, 0), whose slope at 0 is 0 (that of m.maximum would be 1/2).
---@param x Tensor
---@return Tensor
function m.relu(x) end

---Say once, on standard error, that parameters are not trained: `text` and their names.
---@param names string[]
---@param text string
function m.report_untrained(names, text) end

---Root-mean-square normalisation over the axes, with a gain (Zhang and Sennrich 2019).
---@param spec {eps: number, gain: boolean, [integer]: Axis}
---@return Module
function m.rms_norm(spec) end

---Rotary position embedding (Su et al. 2021): rotates the pairs (i, i + dim/2) of `head_dim` by
---position * base^(-2i/dim).
---@param x Tensor with axes seq and head_dim
---@param options? {base: number, seq: string, head_dim: string, offset: integer}
---@return Tensor
function m.rope(x, options) end

---a rounded to the nearest integer, ties to even
---@param a Tensor|number
---@return Tensor
function m.round(a) end

---1 / sqrt(a)
---@param a Tensor|number
---@return Tensor
function m.rsqrt(a) end

---zeros of the new axis, plus the values added at the i32 indices; of the index's axes those listed in `keep` stay, the others are summed over
---@param index Tensor
---@param value Tensor
---@param axis Axis|string
---@param new_axis? Axis
---@param keep? table
---@return Tensor
function m.scatter_add(index, value, axis, new_axis, keep) end

---Call fn(...) with `name` added to the module path: that is where messages and --profile place the
---tensors that it makes.
---@param name string such as "router"
---@param fn function
---@param ... any what fn is given
---@return any ... what fn returns
function m.scope(name, fn, ...) end

---Gradient descent with momentum.
---@param options? {lr: number, momentum: number, nesterov: boolean, weight_decay: number, groups: fun(name: string, p: State): table?}
---@return Optimizer
function m.sgd(options) end

---A value in a message: texts in quotes, what has no text of its own by its type.
---@param value any
---@return string
function m.shown(value) end

---1 / (1 + exp(-a))
---@param a Tensor|number
---@return Tensor
function m.sigmoid(a) end

---1 or -1 as a is positive or negative; a itself where it is zero or NaN
---@param a Tensor|number
---@return Tensor
function m.sign(a) end

---x * sigmoid(x) (also called swish).
---@param x Tensor
---@return Tensor
function m.silu(x) end

---the sine of a, in radians
---@param a Tensor|number
---@return Tensor
function m.sin(a) end

---The state behind a slot: one for each parameter, optimizer and slot, called "wq.adamw.m". Those
---of a second AdamW over the same parameter are called "wq.adamw2.m".
---@param p State
---@param optimizer Optimizer
---@param slot string
---@return State
function m.slot_state(p, optimizer, slot) end

---exp(x) / sum(exp(x)) over the named axes.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.softmax(x, ...) end

---log(1 + exp(x)), without overflow and to the last digits on both sides; log(sigmoid(x)) is -softplus(-x).
---@param x Tensor
---@return Tensor
function m.softplus(x) end

---the square root of a
---@param a Tensor|number
---@return Tensor
function m.sqrt(a) end

---A list of `count` modules, each made by class(i, ...), a class or a function that gives a module.
---@param count integer
---@param class fun(i: integer, ...): Module
---@param ... any
---@return Module[]
function m.stack(count, class, ...) end

---a named tensor that lives across steps; kind is parameter, optimizer, gradient (a sum over microbatches, of which ranks may hold parts) or other
---@param options {name: string, axes: Axis[], dtype: string, kind: string, init: Tensor|number}
---@return State
function m.state(options) end

---The standard deviation over the named axes: the root of m.var. Where all elements are equal it is 0 and has no
---gradient.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.std(x, ...) end

---The program of one training step: forward, gradients, clipping, optimizer. Inputs tokens, targets
---(i32), rate (the schedule's factor) and step (i64, from 1); outputs loss, grad_norm and, where
---modules add losses, aux_loss.
---@param o TrainOptions loss or model, optimizer, batch, seq, clip
---@param parameters? State[] default: those of the model
---@return Program
function m.step_program(o, parameters) end

---A sum over a whole training step, of whatever microbatches it is cut into: `state` becomes the sum
---of `value` over them, and at the step's end update(total) may assign states by it. Only while
---training; elsewhere it does nothing.
---@param state State
---@param value Tensor|number
---@param update? fun(total: Tensor)
function m.step_total(state, value, update) end

---a, through which no gradient flows
---@param a Tensor|number
---@return Tensor
function m.stop_gradient(a) end

---a - b
---@param a Tensor|number
---@param b Tensor|number
---@return Tensor
function m.sub(a, b) end

---silu(gate) * up (Shazeer 2020).
---@param gate Tensor
---@param up Tensor
---@return Tensor
function m.swiglu(gate, up) end

---the hyperbolic tangent of a
---@param a Tensor|number
---@return Tensor
function m.tanh(a) end

---Train a model. `model(tokens)` gives logits, or `loss(tokens, targets)` a sum and a count. batch
---and seq are axes (batch is the whole step's); `accum` cuts a step into microbatches; `clip`
---bounds the gradient norm (default 1; 0: off); `data` is a text file or .bin of u16 tokens
---(default: the text built in); `eval_every` measures the loss on the last `eval_share` of the data
---that often. Prints a line or progress bar; gives {loss=, eval_loss=, steps=}.
---One more training of a model continues: in the data, by the number of samples, whatever the batch (each file and seed has a
---number of its own); in dropout's draws; in the updates that an optimizer counts, where it is the same one. Another model
---begins at the first sample. `skip = 0` begins again.
---`steps`, `data`, `accum` and `seed` default to the settings of those names in m.config.
---@param options TrainOptions
---@return TrainResult
function m.train(options) end

---The log of a training run: .step(step, loss, grad_norm, lr), .eval(step, loss), .close();
---.outside(fn, ...) runs what belongs to no step.
---@param o table m.train's options
---@param flops number of one step
---@param program Program the one that runs most often: a pipeline's says how long its ranks wait
---@return table
function m.training_log(o, flops, program) end

---The progress of a training that begins: .steps() and .samples() that its model has behind it, .offset(p): what is taken
---from the model's steps to count the updates of a parameter by this optimizer, .begin() before the first step,
---.advance(samples) after each.
---@param model Module
---@param optimizer table
---@param data string the name of the data and their order
---@return table
function m.training_progress(model, optimizer, data) end

---Uniform in [0, 1). Without a key the numbers differ at each call and, in m.train and in programs with an input `step`
---of dtype i64, at each step; they follow the seed, and each evaluation of m.train draws the same ones again.
---@param axes Axis[]
---@param key? integer|Tensor an i64; equal keys give equal numbers
---@return Tensor
function m.uniform(axes, key) end

---Give all programs and states of the script their layout, as the option `layout` of m.train and
---m.compile does; at the prompt, tensors then show where they lie and what ranks send for them.
---@param value Layout made by m.layout
---@param what? string the function that takes it, for messages
function m.use_layout(value, what) end

---The variance over the named axes (divided by n, not n-1).
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.var(x, ...) end

---b where a is true, c elsewhere
---@param a Tensor
---@param b Tensor|number
---@param c Tensor|number
---@return Tensor
function m.where(a, b, c) end

---Warm-up, stable, then linear decay to `final` (a factor, default 0) over the last `decay` share of
---all steps, those of the warm-up among them (default 0.2) (Hu et al. 2024). A warm-up that leaves less is followed by
---the decay at once.
---@param options? {warmup: integer, decay: number, final: number}
---@return fun(step: integer, steps: integer): number
function m.wsd(options) end

---A tensor full of zeros.
---@param axes Axis[]
---@param dtype? string default "f32"
---@return Tensor
function m.zeros(axes, dtype) end

return m
