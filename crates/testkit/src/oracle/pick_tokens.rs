//! `PickTokens`, naively. [`draw_margin`] says how far a uniform number is from the next token's share: a draw on a
//! boundary has no one right answer in fp32, so cases keep away from it.

use super::Run;
use drafthorse_graph::op::PickTokens;

/// Results for one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// Index of the largest logit, the lowest of equals.
    pub argmax: i32,
    /// Largest and second largest logit.
    pub top2: [f64; 2],
    /// Probability of the probe.
    pub prob: f64,
    /// A sample without the probe.
    pub drawn: i32,
}

/// Softmax of `z / temperature`, `temperature > 0`.
fn softmax(z: &[f64], temperature: f64) -> Vec<f64> {
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = z.iter().map(|v| ((v - max) / temperature).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|v| v / sum).collect()
}

/// Softmax of `z / temperature` over the tokens besides the probe; the probe gets 0.
fn without(z: &[f64], temperature: f64, probe: i32) -> Vec<f64> {
    softmax(
        &z.iter().enumerate().map(|(i, &z)| if i as i32 == probe { f64::NEG_INFINITY } else { z }).collect::<Vec<_>>(),
        temperature,
    )
}

/// Picks of one row of logits.
pub fn pick_row(z: &[f64], temperature: f64, uniform: f64, probe: i32) -> Pick {
    let mut order: Vec<usize> = (0..z.len()).collect();
    order.sort_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
    let argmax = order[0] as i32;
    let top2 = [z[order[0]], z[order[1]]];
    if temperature == 0.0 {
        return Pick { argmax, top2, prob: f64::from(u8::from(probe == argmax)), drawn: argmax };
    }
    let p = softmax(z, temperature);
    let prob = usize::try_from(probe).map_or(0.0, |i| p[i]);
    let rest = without(z, temperature, probe);
    let target = uniform * rest.iter().sum::<f64>();
    let mut drawn = rest.iter().rposition(|&p| p > 0.0).expect("some token besides the probe is possible") as i32;
    let mut sum = 0.0;
    for (i, p) in rest.iter().enumerate() {
        sum += p;
        if sum > target {
            drawn = i as i32;
            break;
        }
    }
    Pick { argmax, top2, prob, drawn }
}

/// Distance of `uniform` from the nearest boundary between two tokens' shares.
pub fn draw_margin(z: &[f64], temperature: f64, uniform: f64, probe: i32) -> f64 {
    if temperature == 0.0 {
        return 1.0;
    }
    let (mut sum, mut margin) = (0.0, f64::INFINITY);
    for p in without(z, temperature, probe) {
        sum += p;
        margin = margin.min((sum - uniform).abs());
    }
    margin
}

pub(super) fn pick_tokens(run: &mut Run<'_>, op: &PickTokens) {
    let (logits, temperature) = (run.floats(op.logits), run.floats(op.temperature)[0]);
    let (uniform, probe, vocab) = (run.floats(op.uniform), run.ints(op.probe), run.cols(op.logits));
    let (mut argmax, mut top2, mut prob, mut abs, mut drawn) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (r, z) in logits.chunks(vocab).enumerate() {
        let pick = pick_row(z, temperature, uniform[r], probe[r]);
        let largest = z.iter().map(|z| z.abs()).fold(0.0, f64::max);
        argmax.push(pick.argmax);
        top2.extend(pick.top2);
        prob.push(pick.prob);
        abs.push(if temperature == 0.0 { 0.0 } else { pick.prob * (2.0 + 4.0 * largest / temperature) });
        drawn.push(pick.drawn);
    }
    run.put_ints(op.picks.argmax, argmax);
    run.put_copy(op.picks.top2, top2);
    run.put(op.picks.prob, prob, vocab, abs);
    run.put_ints(op.picks.drawn, drawn);
}
