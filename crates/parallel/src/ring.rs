//! Ring attention: each rank keeps its queries, and blocks of keys and values go round; what each block contributes is merged by
//! the logarithm of its sum of exponentials, so the result is that of attention over all keys. In backward the blocks go round
//! again, and the gradients of each with it.

use comm::{Group, Pending};
use tch::{Kind, Tensor};
use torch::attention;
use torch::autograd::{BoxError, custom_node};

use crate::cp::kept;
use crate::error::{Error, Result};
use crate::exchange::Exchange;

/// Stretches (first, count) of the tokens of a block that count.
type Stretches = Vec<(i64, i64)>;

/// Queries [B, H, T, K] of this rank over the keys and values of all, of which each rank's block counts in its stretches.
pub(crate) fn attend(ring: &Exchange, qkv: [&Tensor; 3], blocks: &[Stretches]) -> nn::Result<Tensor> {
    let failed = |error: Error| ring.trouble().layer(error);
    let [q, k, v] = qkv.map(Tensor::detach);
    let own = Tensor::f_stack(&[&k, &v], 0)?;
    let (out, lse) = tch::no_grad(|| forward(ring.group(), &q, &own, blocks)).map_err(failed)?;
    let result = out.f_detach()?;
    let (again, blocks) = (ring.clone(), blocks.to_vec());
    custom_node("RingAttention", &qkv.map(Tensor::shallow_clone), &[result.shallow_clone()], move |gradients| {
        let gradient = match &gradients[0] {
            Some(gradient) => gradient.f_contiguous()?,
            None => out.f_zeros_like()?,
        };
        let saved = Saved { q: &q, own: &own, out: &out, lse: &lse };
        let back = tch::no_grad(|| backward(again.group(), &saved, &gradient, &blocks));
        let [q, k, v] = back.map_err(|error| -> BoxError { again.trouble().note(error).into() })?;
        Ok(vec![Some(q), Some(k), Some(v)])
    })?;
    Ok(result)
}

fn forward(ring: &Group, q: &Tensor, own: &Tensor, blocks: &[Stretches]) -> Result<(Tensor, Tensor)> {
    let mut merged: Option<(Tensor, Tensor)> = None;
    let mut block = own.shallow_clone();
    for step in 0..ring.size() {
        // The next block comes while this one is worked on.
        let coming = if step + 1 < ring.size() { Some(shift(ring, &block)?) } else { None };
        let stretches = &blocks[owner(ring, step)];
        if !stretches.is_empty() {
            let (k, v) = (kept(&block.f_get(0)?, stretches)?, kept(&block.f_get(1)?, stretches)?);
            let (out, lse) = attention::with_lse(q, &k, &v)?;
            merged = Some(merge(merged, &out, lse)?);
        }
        if let Some(coming) = coming {
            block = coming.wait()?;
        }
    }
    let (out, lse) = merged.ok_or_else(|| Error::Unfit("attention over no keys".to_owned()))?;
    Ok((out.f_to_kind(q.kind())?, lse))
}

struct Saved<'a> {
    q: &'a Tensor,
    /// Keys and values of this rank, stacked.
    own: &'a Tensor,
    out: &'a Tensor,
    lse: &'a Tensor,
}

/// Gradients of queries, keys and values.
fn backward(ring: &Group, saved: &Saved<'_>, gradient: &Tensor, blocks: &[Stretches]) -> Result<[Tensor; 3]> {
    let Saved { q, own, out, lse } = *saved;
    let wide = wide(q.kind());
    let mut of_q = Tensor::f_zeros(q.size(), (wide, q.device()))?;
    let mut block = own.shallow_clone();
    // Gradients of the block that is here, from the ranks where it was.
    let mut of_block = Tensor::f_zeros(own.size(), (wide, q.device()))?;
    for step in 0..ring.size() {
        let coming = if step + 1 < ring.size() { Some(shift(ring, &block)?) } else { None };
        let stretches = &blocks[owner(ring, step)];
        if !stretches.is_empty() {
            let (k, v) = (kept(&block.f_get(0)?, stretches)?, kept(&block.f_get(1)?, stretches)?);
            let [dq, dk, dv] = attention::backward(gradient, [q, &k, &v], out, lse)?;
            of_q = of_q.f_add(&dq)?;
            let mut from = 0;
            for (first, count) in stretches {
                for (i, part) in [&dk, &dv].into_iter().enumerate() {
                    let mut place = of_block.f_get(i as i64)?.f_narrow(2, *first, *count)?;
                    let _ = place.f_add_(&part.f_narrow(2, from, *count)?.f_to_kind(wide)?)?;
                }
                from += count;
            }
        }
        if let Some(coming) = coming {
            block = coming.wait()?;
        }
        // After the last step the block's gradients are home.
        of_block = shift(ring, &of_block)?.wait()?;
    }
    let narrow = |x: Tensor| x.f_to_kind(q.kind());
    Ok([narrow(of_q)?, narrow(of_block.f_get(0)?)?, narrow(of_block.f_get(1)?)?])
}

/// Whose block is here after so many shifts.
fn owner(ring: &Group, step: usize) -> usize {
    (ring.index() + ring.size() - step) % ring.size()
}

/// A block on its way to the next rank, and the one that comes from the rank before.
struct Shift {
    sent: Pending,
    received: Pending,
    block: Tensor,
}

fn shift(ring: &Group, block: &Tensor) -> Result<Shift> {
    let (next, before) = ((ring.index() + 1) % ring.size(), (ring.index() + ring.size() - 1) % ring.size());
    let here = block.f_contiguous()?;
    let coming = here.f_empty_like()?;
    // The first call between two GPUs waits until the other makes its own: if all sent first, nobody would ever receive.
    let (sent, received);
    if ring.index() == 0 {
        received = ring.receive(&coming, before)?;
        sent = ring.send(&here, next)?;
    } else {
        sent = ring.send(&here, next)?;
        received = ring.receive(&coming, before)?;
    }
    Ok(Shift { sent, received, block: coming })
}

impl Shift {
    fn wait(self) -> Result<Tensor> {
        self.received.wait()?;
        self.sent.wait()?;
        Ok(self.block)
    }
}

/// Two results over different keys as one over all of them, in the wide kind.
fn merge(before: Option<(Tensor, Tensor)>, out: &Tensor, lse: Tensor) -> Result<(Tensor, Tensor)> {
    let out = out.f_to_kind(wide(out.kind()))?;
    let Some((old, old_lse)) = before else { return Ok((out, lse)) };
    let both = old_lse.f_logaddexp(&lse)?;
    let weight = |lse: &Tensor| lse.f_sub(&both)?.f_exp()?.f_unsqueeze(-1);
    let out = old.f_mul(&weight(&old_lse)?)?.f_add(&out.f_mul(&weight(&lse)?)?)?;
    Ok((out, both))
}

fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
