//! What a draft block may see, by changing what it may not.
//!
//! Job: random drafters, samples and blocks; then features at or after a block's anchor, tokens after it, or another sample are changed, and
//! the block's final hidden rows must keep every bit; a feature that the block sees is changed, and they must not. Refuses
//! tolerances: a leak of one ulp is a leak.

#[path = "support/drafter.rs"]
mod drafter;
#[path = "support/machine.rs"]
mod machine;

use drafter::{Blocks, POSITIONS, RowResults, Trainer, Weights};
use drafthorse_models::draft::dflash::TrainShape;
use drafthorse_models::draft_config::{DraftConfig, LayerKind};
use drafthorse_models::rope::RopeSpec;
use drafthorse_models::tensor_names::draft_sources;
use drafthorse_testkit::inputs::{Rng, draft_blocks, packed_samples};
use proptest::prelude::*;
use std::sync::Arc;

const HIDDEN: usize = 16;
const VOCAB: usize = 40;
const BUDGET: usize = 64;

fn config(block_size: usize, kinds: Vec<LayerKind>, window: usize) -> DraftConfig {
    let slides = kinds.contains(&LayerKind::Sliding);
    let config = DraftConfig {
        hidden: HIDDEN,
        intermediate: 20,
        layers: kinds.len(),
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        target_hidden: HIDDEN,
        target_layers: 4,
        target_layer_ids: vec![0, 2],
        block_size,
        mask_token_id: 0,
        rms_eps: 1e-6,
        rope: RopeSpec::full(1e4, 8),
        layer_types: kinds,
        sliding_window: slides.then_some(window),
        max_positions: POSITIONS,
        vocab: VOCAB,
    };
    config.validate().unwrap();
    config
}

fn normals(rng: &mut Rng, n: usize, std: f64) -> Vec<f32> {
    rng.normals(n, std).into_iter().map(|x| x as f32).collect()
}

fn weights(config: &DraftConfig, rng: &mut Rng) -> Weights {
    let draft = draft_sources(config)
        .into_iter()
        .map(|f| {
            // Norm weights around 1, linears that keep the size of their input.
            let data = match f.shape.as_slice() {
                [n] => rng.normals(*n, 0.1).into_iter().map(|x| 1.0 + x as f32).collect(),
                _ => normals(rng, f.elements(), (f.shape[1] as f64).powf(-0.5)),
            };
            (f.name, data)
        })
        .collect();
    let mut table = || Arc::new(normals(rng, VOCAB * HIDDEN, 1.0));
    Weights { draft, embed: table(), head: table() }
}

/// A batch, the length of each sample and the sample of each block.
#[derive(Clone)]
struct World {
    batch: Blocks,
    lengths: Vec<usize>,
    sample: Vec<usize>,
    starts: Vec<usize>,
    block_size: usize,
}

fn world(lengths: &[usize], config: &DraftConfig, rng: &mut Rng) -> World {
    let packed = packed_samples(lengths, lengths.len(), lengths.iter().sum());
    let rows = packed.positions.len();
    let n = 2 * lengths.len() + 3;
    let drawn = draft_blocks(rng, &packed, n, n);
    let starts: Vec<usize> = packed.cu_seqlens[..lengths.len()].iter().map(|&c| c as usize).collect();
    let sample = drawn.ctx_start.iter().map(|&c| starts.iter().position(|&s| s == c as usize).unwrap()).collect();
    let batch = Blocks {
        features: normals(rng, rows * config.fc_columns(), 1.0),
        tokens: rng.indices(rows, VOCAB),
        positions: packed.positions,
        ctx_start: drawn.ctx_start,
        anchor: drawn.anchor,
        labels: Vec::new(),
        weights: Vec::new(),
    };
    let mut world = World { batch, lengths: lengths.to_vec(), sample, starts, block_size: config.block_size };
    world.label();
    world
}

impl World {
    /// Labels and weights that follow from the tokens: all of them are supervised.
    fn label(&mut self) {
        let slots = (0..self.sample.len()).flat_map(|n| (0..self.block_size).map(move |k| (n, k)));
        let token = |(n, k): (usize, usize)| {
            let at = self.batch.anchor[n] as usize + k;
            (at < self.lengths[self.sample[n]]).then(|| self.batch.tokens[self.starts[self.sample[n]] + at])
        };
        let labels: Vec<Option<i32>> = slots.clone().map(token).collect();
        self.batch.weights = slots.zip(&labels).map(|((_, k), l)| f32::from(u8::from(k > 0 && l.is_some()))).collect();
        self.batch.labels = labels.into_iter().map(Option::unwrap_or_default).collect();
    }

    fn anchor_row(&self, n: usize) -> usize {
        (self.batch.ctx_start[n] + self.batch.anchor[n]) as usize
    }
}

/// Bits of each block's final hidden rows.
fn hidden(trainer: &mut Trainer, world: &World) -> (Vec<Vec<u32>>, RowResults) {
    let (rows, hidden) = trainer.measure(&world.batch);
    let width = world.block_size * HIDDEN;
    (hidden.chunks(width).map(|b| b.iter().map(|x| x.to_bits()).collect()).collect(), rows)
}

fn kinds() -> impl Strategy<Value = Vec<LayerKind>> {
    prop::collection::vec(prop_oneof![Just(LayerKind::Full), Just(LayerKind::Sliding)], 1..3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_block_sees_its_own_past_and_nothing_else(
        seed in 0u64..1 << 32,
        kinds in kinds(),
        block_size in 2usize..7,
        spare in 0usize..4,
        lengths in prop::collection::vec(1usize..16, 2..5),
    ) {
        let mut rng = Rng::new(seed);
        let config = config(block_size, kinds, block_size + spare);
        let weights = weights(&config, &mut rng);
        let before = world(&lengths, &config, &mut rng);
        let n = before.sample.len();
        let shape = TrainShape { budget: BUDGET, micro_blocks: 3, loss_chunk: 8, recompute: false, mean_context: 8 };
        let mut trainer = Trainer::new(&config, &weights, shape, true);
        let (want, _) = hidden(&mut trainer, &before);
        let width = config.fc_columns();
        let rows = before.batch.tokens.len();
        let chosen = rng.below(n);
        let anchor_row = before.anchor_row(chosen);
        let same_sample = |b: usize| before.sample[b] == before.sample[chosen];

        // 1. Every feature at or after the anchor, and every feature of other samples.
        let mut world = before.clone();
        let own = before.batch.ctx_start[chosen] as usize..anchor_row;
        for row in (0..rows).filter(|r| !own.contains(r)) {
            for x in &mut world.batch.features[row * width..(row + 1) * width] {
                *x = 1.0 - 3.0 * *x;
            }
        }
        let (got, _) = hidden(&mut trainer, &world);
        prop_assert_eq!(&got[chosen], &want[chosen], "features that block {} may not see", chosen);
        for b in 0..n {
            let (anchor, limit) = (before.batch.anchor[b], before.batch.anchor[chosen]);
            if same_sample(b) && anchor <= limit {
                prop_assert_eq!(&got[b], &want[b], "block {} of the same sample, whose anchor is no later", b);
            } else if anchor > 0 {
                // It sees the row before its own anchor, which has changed: this is what makes the lines above able to fail.
                prop_assert_ne!(&got[b], &want[b], "block {} sees features of its own that changed", b);
            }
        }

        // 2. Every token but the anchor's own: tokens enter through the anchor's embedding only.
        let mut world = before.clone();
        for row in (0..rows).filter(|&r| r != anchor_row) {
            world.batch.tokens[row] = (world.batch.tokens[row] + 1) % VOCAB as i32;
        }
        world.label();
        let (got, results) = hidden(&mut trainer, &world);
        prop_assert_eq!(&got[chosen], &want[chosen], "tokens other than the anchor of block {}", chosen);
        for (at, ce) in results.at.iter().zip(&results.ce) {
            prop_assert!(ce.is_finite(), "{:?}", at);
        }
        let differing = (0..n).filter(|&b| before.anchor_row(b) != anchor_row).all(|b| got[b] != want[b]);
        prop_assert!(differing, "another anchor token gives another block");

        // 3. The last feature before the anchor, which slot 0 sees in every layer.
        if before.batch.anchor[chosen] > 0 {
            let mut world = before.clone();
            for x in &mut world.batch.features[(anchor_row - 1) * width..anchor_row * width] {
                *x = 1.0 - 3.0 * *x;
            }
            let (got, _) = hidden(&mut trainer, &world);
            prop_assert_ne!(&got[chosen], &want[chosen], "the feature before the anchor of block {}", chosen);
            for b in (0..n).filter(|&b| before.sample[b] != before.sample[chosen]) {
                prop_assert_eq!(&got[b], &want[b], "block {} of another sample", b);
            }
            for b in (0..n).filter(|&b| same_sample(b) && before.batch.anchor[b] < before.batch.anchor[chosen]) {
                prop_assert_eq!(&got[b], &want[b], "block {}, whose anchor comes first", b);
            }
        }
    }

    /// One sliding layer, so that what a slot sees is the mask of one attention: slot k sees positions ≥ anchor + k - (W-1), and slots ≤ k.
    #[test]
    fn a_sliding_window_ends_where_it_should(
        seed in 0u64..1 << 32,
        block_size in 2usize..7,
        spare in 0usize..4,
        length in 10usize..16,
        anchor in 0usize..16,
    ) {
        let anchor = anchor.min(length - 1);
        // The narrowest window that a config may have is the block.
        let window = block_size + spare;
        let mut rng = Rng::new(seed);
        let config = config(block_size, vec![LayerKind::Sliding], window);
        let weights = weights(&config, &mut rng);
        let mut one = world(&[length], &config, &mut rng);
        one.sample = vec![0];
        (one.batch.ctx_start, one.batch.anchor) = (vec![0], vec![anchor as i32]);
        one.label();
        let shape = TrainShape { budget: BUDGET, micro_blocks: 1, loss_chunk: 8, recompute: false, mean_context: 8 };
        let mut trainer = Trainer::new(&config, &weights, shape, true);
        let (want, _) = hidden(&mut trainer, &one);
        let width = config.fc_columns();
        let original = one.batch.features.clone();
        for position in 0..length {
            one.batch.features.clone_from(&original);
            for x in &mut one.batch.features[position * width..(position + 1) * width] {
                *x = 1.0 - 3.0 * *x;
            }
            let (got, _) = hidden(&mut trainer, &one);
            for k in 0..block_size {
                let row = k * HIDDEN..(k + 1) * HIDDEN;
                let sees = position < anchor && position + window > anchor + k;
                let same = got[0][row.clone()] == want[0][row];
                prop_assert_eq!(same, !sees, "slot {} and position {} with anchor {} and window {}", k, position, anchor, window);
            }
        }
    }

    /// The backward pass: the rows of context K and V that get a gradient are those that some supervised block sees.
    #[test]
    fn gradients_reach_what_is_seen_and_nothing_else(
        seed in 0u64..1 << 32,
        kinds in kinds(),
        block_size in 2usize..7,
        spare in 0usize..4,
        lengths in prop::collection::vec(1usize..16, 1..4),
    ) {
        let mut rng = Rng::new(seed);
        let config = config(block_size, kinds, block_size + spare);
        let weights = weights(&config, &mut rng);
        let world = world(&lengths, &config, &mut rng);
        let shape = TrainShape { budget: BUDGET, micro_blocks: 3, loss_chunk: 8, recompute: false, mean_context: 8 };
        let mut trainer = Trainer::new(&config, &weights, shape, false);
        trainer.gradients(&world.batch);
        for (l, kind) in config.layer_types.iter().enumerate() {
            let window = if *kind == LayerKind::Sliding { block_size + spare } else { usize::MAX };
            // A slot passes a gradient on when it carries loss or a slot that carries loss looks at it in this layer or a later one.
            let carries = |n: usize| world.batch.weights[n * block_size..(n + 1) * block_size].iter().any(|&w| w > 0.0);
            let mut seen = [false; BUDGET];
            for n in (0..world.sample.len()).filter(|&n| carries(n)) {
                let (start, anchor) = (world.batch.ctx_start[n] as usize, world.batch.anchor[n] as usize);
                for position in 0..anchor {
                    // Slot 1 always carries loss here and sees slot 0 in any later layer; in the last layer slot 0 itself carries none.
                    let first = usize::from(l + 1 == config.layers);
                    seen[start + position] |= position.saturating_add(window) > anchor + first;
                }
            }
            for part in ["k", "v"] {
                let t = trainer.m.program.find(&format!("draft.context.{l}.{part}.grad")).unwrap();
                let got = trainer.m.get(t);
                let width = got.len() / BUDGET;
                let reached: Vec<bool> = got.chunks(width).map(|row| row.iter().any(|&g| g != 0.0)).collect();
                // Where nothing but one key is seen the softmax is constant, so only V shows that the row was reached.
                let wrong = (0..BUDGET).find(|&r| if part == "v" { reached[r] != seen[r] } else { reached[r] && !seen[r] });
                prop_assert_eq!(wrong, None, "layer {} {}: {:?}", l, part, kind);
            }
        }
    }
}
