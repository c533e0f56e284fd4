//! Speculative decoding with a target and its drafter: what `eval`, `generate` and `overfit` run.
//!
//! Job: prompts to tokens through prefill, draft and verify passes, and the same without drafts (plain decoding through the same verify pass
//! with one valid row). Refuses text (tokens in, tokens out) and batching of requests. Invariants: lossless — at temperature 0 every emitted token is the
//! target's argmax given the tokens before it; above 0 it is distributed as the target's softmax; the caches hold exactly the tokens that count.
//! Source: DESIGN 1; Leviathan et al. 2023, arXiv 2211.17192, with the draft distribution a point mass.

use drafthorse_data::rng::{CounterRng, Stream};
use drafthorse_graph::{DType, ExecError, Executor, HostMut, HostRef, Program, SlotArg, TensorId};
use drafthorse_models::draft::dflash::{Dflash, DraftPasses};
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::target::{DecodePasses, Target};
use std::sync::Arc;

/// Prompt tokens per prefill pass.
pub const PREFILL_ROWS: usize = 64;

/// A program for decoding: target and drafter with caches of one request.
pub struct DecodeProgram {
    /// The program.
    pub program: Arc<Program>,
    target: DecodePasses,
    draft: DraftPasses,
    /// (internal name, weight) of the drafter.
    pub weights: Vec<(String, TensorId)>,
    block: usize,
    mask: u32,
}

/// Declares a decoding program for requests of at most `max_tokens` tokens, prompt included.
pub fn decode_program(act: DType, target: &TargetConfig, draft: &DraftConfig, max_tokens: usize) -> DecodeProgram {
    let mut program = Program::new(act);
    let capacity = max_tokens + PREFILL_ROWS.max(draft.block_size);
    let model = Target::declare(&mut program, target, capacity);
    let drafter = Dflash::declare(&mut program, draft, model.shared(), capacity);
    let passes = model.decode_passes(&mut program, capacity, PREFILL_ROWS, draft.block_size, &draft.target_layer_ids);
    let draft_passes = drafter.draft_passes(&mut program, capacity, passes.prefill.features, passes.verify.features);
    DecodeProgram {
        program: Arc::new(program),
        target: passes,
        draft: draft_passes,
        weights: drafter.parameters.weights,
        block: draft.block_size,
        mask: draft.mask_token_id,
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Prompt tokens, at least one.
    pub prompt: &'a [u32],
    /// Tokens to emit at most, the prefill's own included. [`Decoder::max_tokens`] bounds prompt and completion together.
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: f32,
    /// Tokens that end a completion.
    pub stop: &'a [u32],
    /// Seeds the draws, with `number`.
    pub seed: u64,
    /// Number of the request, so that requests draw independently.
    pub number: u64,
}

/// Where an emitted token came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The prefill's own token.
    Prefill,
    /// A draft that the target accepted, in this slot.
    Draft(usize),
    /// The target's own token: after a rejection, or the bonus after a whole accepted block.
    Target,
}

/// One emitted token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Emitted {
    /// Its id.
    pub token: u32,
    /// Where it came from.
    pub origin: Origin,
    /// The target's two largest logits at its position.
    pub top2: [f32; 2],
}

/// A finished completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// Tokens in order, the prefill's own first.
    pub emitted: Vec<Emitted>,
    /// Tokens emitted by each verify pass.
    pub per_pass: Vec<usize>,
    /// Drafts of slot k (index k-1) that were accepted and emitted, over verify passes. What a stop token or the limit cuts off does not count, as
    /// it does not in τ: tokens of verify passes less these are the target's own.
    pub accepted: Vec<u64>,
    /// True when a stop token ended it.
    pub stopped: bool,
}

impl Completion {
    /// Token ids.
    pub fn tokens(&self) -> Vec<u32> {
        self.emitted.iter().map(|e| e.token).collect()
    }

    /// Tokens emitted by verify passes.
    pub fn verified_tokens(&self) -> usize {
        self.per_pass.iter().sum()
    }

    /// Verify passes.
    pub fn passes(&self) -> usize {
        self.per_pass.len()
    }
}

/// What one verify pass says, per row.
struct Verdicts {
    argmax: Vec<i32>,
    top2: Vec<f32>,
    prob: Vec<f32>,
    drawn: Vec<i32>,
}

/// Decodes requests one at a time.
pub struct Decoder<E> {
    exec: E,
    program: DecodeProgram,
}

impl<E: Executor> Decoder<E> {
    /// Takes an executor of `program.program` and prepares it.
    ///
    /// # Errors
    /// When the device fails.
    pub fn new(mut exec: E, program: DecodeProgram) -> Result<Decoder<E>, ExecError> {
        exec.prepare()?;
        let (b, block) = (&program.draft.block, program.block);
        exec.write(b.ctx_start, HostRef::I32(&[0]))?;
        exec.write(b.n_blocks, HostRef::I32(&[1]))?;
        exec.write(b.temperature, HostRef::F32(&[0.0]))?;
        exec.write(b.uniform, HostRef::F32(&vec![0.0; block]))?;
        exec.write(b.probe, HostRef::I32(&vec![-1; block]))?;
        Ok(Decoder { exec, program })
    }

    /// Sets the drafter's weights from (internal name, values).
    ///
    /// # Errors
    /// When the device fails or a length differs.
    ///
    /// # Panics
    /// When a weight is missing: a checkpoint of another drafter would have been refused before.
    pub fn load_drafter(&mut self, weights: &[(String, Vec<f32>)]) -> Result<(), ExecError> {
        for (name, t) in &self.program.weights {
            let (_, values) = weights.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no weight `{name}`"));
            self.exec.write(*t, HostRef::F32(values))?;
        }
        Ok(())
    }

    /// Tokens a request may have, prompt included.
    pub fn max_tokens(&self) -> usize {
        self.program.target.capacity - PREFILL_ROWS.max(self.program.block)
    }

    /// Completes a request with drafts.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the prompt is empty or longer than [`Decoder::max_tokens`].
    pub fn speculate(&mut self, request: &Request<'_>) -> Result<Completion, ExecError> {
        self.complete(request, true, &|| false)
    }

    /// As [`Decoder::speculate`], but asks `stop` before each pass and ends there with what it has.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// As [`Decoder::speculate`].
    pub fn speculate_until(&mut self, request: &Request<'_>, stop: &dyn Fn() -> bool) -> Result<Completion, ExecError> {
        self.complete(request, true, stop)
    }

    /// Completes a request without drafts, through the same verify pass.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// As [`Decoder::speculate`].
    pub fn plain(&mut self, request: &Request<'_>) -> Result<Completion, ExecError> {
        self.complete(request, false, &|| false)
    }

    fn complete(&mut self, request: &Request<'_>, drafts: bool, stop: &dyn Fn() -> bool) -> Result<Completion, ExecError> {
        let block = self.program.block;
        let (last, head) = request.prompt.split_last().expect("a prompt has at least one token");
        let room =
            self.max_tokens().checked_sub(request.prompt.len()).expect("the decoder was declared for prompts of this length");
        let limit = request.max_new_tokens.min(room);
        let mut completion = Completion { accepted: vec![0; block - 1], ..Completion::default() };
        if limit == 0 {
            return Ok(completion);
        }
        self.exec.write(self.program.target.temperature, HostRef::F32(&[request.temperature]))?;
        for (i, chunk) in head.chunks(PREFILL_ROWS).enumerate() {
            if stop() {
                return Ok(completion);
            }
            self.prefill(chunk, i * PREFILL_ROWS)?;
        }
        if stop() {
            return Ok(completion);
        }
        let mut len = head.len();
        let verdicts = self.verify(request, &[*last], len)?;
        self.extend(len)?;
        len += 1;
        let first = Emitted { token: verdicts.drawn[0] as u32, origin: Origin::Prefill, top2: top2(&verdicts, 0) };
        completion.emitted.push(first);
        completion.stopped = request.stop.contains(&first.token);
        while !completion.stopped && completion.emitted.len() < limit && !stop() {
            let anchor = completion.emitted.last().expect("the prefill emitted one").token;
            let mut rows = vec![anchor];
            if drafts {
                rows.extend(self.draft(anchor, len)?);
            }
            let verdicts = self.verify(request, &rows, len)?;
            let accepted = self.accepted(request, &rows, &verdicts, len);
            let mut emitted = 0;
            for k in 0..=accepted {
                let (token, origin) =
                    if k < accepted { (rows[k + 1], Origin::Draft(k + 1)) } else { (verdicts.drawn[k] as u32, Origin::Target) };
                if k < accepted {
                    completion.accepted[k] += 1;
                }
                completion.emitted.push(Emitted { token, origin, top2: top2(&verdicts, k) });
                emitted += 1;
                completion.stopped = request.stop.contains(&token);
                if completion.stopped || completion.emitted.len() == limit {
                    break;
                }
            }
            completion.per_pass.push(emitted);
            if drafts {
                self.extend(len)?;
            }
            len += accepted + 1;
        }
        Ok(completion)
    }

    /// Length of the accepted prefix of `rows[1..]`.
    fn accepted(&self, request: &Request<'_>, rows: &[u32], verdicts: &Verdicts, len: usize) -> usize {
        let mut accepted = 0;
        while accepted + 1 < rows.len() {
            let keep = if request.temperature == 0.0 {
                verdicts.argmax[accepted] as u32 == rows[accepted + 1]
            } else {
                acceptance_draw(request, len + accepted) < verdicts.prob[accepted]
            };
            if !keep {
                break;
            }
            accepted += 1;
        }
        accepted
    }

    fn prefill(&mut self, tokens: &[u32], start: usize) -> Result<(), ExecError> {
        let (pass, context) = (&self.program.target.prefill, &self.program.draft.prefill);
        let positions = positions(start, pass.rows);
        self.exec.write(pass.tokens, HostRef::I32(&padded(tokens, pass.rows)))?;
        self.exec.write(pass.positions, HostRef::I32(&positions))?;
        self.exec.write(self.program.target.len, HostRef::I32(&[start as i32]))?;
        self.exec.run(pass.phase, SlotArg::None)?;
        self.exec.write(context.positions, HostRef::I32(&positions))?;
        self.exec.write(self.program.draft.len, HostRef::I32(&[start as i32]))?;
        self.exec.run(context.phase, SlotArg::None)
    }

    fn verify(&mut self, request: &Request<'_>, rows: &[u32], start: usize) -> Result<Verdicts, ExecError> {
        let (target, n) = (&self.program.target, self.program.block);
        let mut probe = vec![-1; n];
        for (probe, &draft) in probe.iter_mut().zip(&rows[1..]) {
            *probe = draft as i32;
        }
        let uniform: Vec<f32> = (0..n).map(|r| token_draw(request, start + r)).collect();
        self.exec.write(target.verify.tokens, HostRef::I32(&padded(rows, n)))?;
        self.exec.write(target.verify.positions, HostRef::I32(&positions(start, n)))?;
        self.exec.write(target.len, HostRef::I32(&[start as i32]))?;
        self.exec.write(target.uniform, HostRef::F32(&uniform))?;
        self.exec.write(target.probe, HostRef::I32(&probe))?;
        self.exec.run(target.verify.phase, SlotArg::None)?;
        let picks = target.picks;
        let mut v = Verdicts { argmax: vec![0; n], top2: vec![0.0; 2 * n], prob: vec![0.0; n], drawn: vec![0; n] };
        self.exec.read(picks.argmax, HostMut::I32(&mut v.argmax))?;
        self.exec.read(picks.top2, HostMut::F32(&mut v.top2))?;
        self.exec.read(picks.prob, HostMut::F32(&mut v.prob))?;
        self.exec.read(picks.drawn, HostMut::I32(&mut v.drawn))?;
        Ok(v)
    }

    /// Features of the last verify pass → the drafter's caches, from row `start`. Rows past the accepted ones are overwritten by the next call.
    fn extend(&mut self, start: usize) -> Result<(), ExecError> {
        let context = &self.program.draft.verify;
        self.exec.write(context.positions, HostRef::I32(&positions(start, self.program.block)))?;
        self.exec.write(self.program.draft.len, HostRef::I32(&[start as i32]))?;
        self.exec.run(context.phase, SlotArg::None)
    }

    fn draft(&mut self, anchor: u32, start: usize) -> Result<Vec<u32>, ExecError> {
        let (pass, n) = (&self.program.draft.block, self.program.block);
        let mut ids = vec![self.program.mask as i32; n];
        ids[0] = anchor as i32;
        self.exec.write(pass.ids, HostRef::I32(&ids))?;
        self.exec.write(pass.positions, HostRef::I32(&positions(start, n)))?;
        self.exec.write(self.program.draft.len, HostRef::I32(&[start as i32]))?;
        self.exec.run(pass.phase, SlotArg::None)?;
        let mut argmax = vec![0; n];
        self.exec.read(pass.picks.argmax, HostMut::I32(&mut argmax))?;
        Ok(argmax[1..].iter().map(|&t| t as u32).collect())
    }
}

fn top2(verdicts: &Verdicts, row: usize) -> [f32; 2] {
    [verdicts.top2[2 * row], verdicts.top2[2 * row + 1]]
}

fn padded(tokens: &[u32], rows: usize) -> Vec<i32> {
    let mut out: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    out.resize(rows, 0);
    out
}

fn positions(start: usize, rows: usize) -> Vec<i32> {
    (start..start + rows).map(|p| p as i32).collect()
}

/// The draw of the token after the row at `position`, and whether the draft after it is accepted: independent of how a completion was cut into passes.
fn token_draw(request: &Request<'_>, position: usize) -> f32 {
    CounterRng::new(request.seed, Stream::Decoding, position as u32, 2 * request.number).uniform_f32()
}

fn acceptance_draw(request: &Request<'_>, position: usize) -> f32 {
    CounterRng::new(request.seed, Stream::Decoding, position as u32, 2 * request.number + 1).uniform_f32()
}
