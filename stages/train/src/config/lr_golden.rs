//! Printed by NeMo Automodel 0.7.0's `OptimizerParamScheduler`; reference of the tests of `lr_scheduler.rs`.
#![expect(clippy::unreadable_literal, reason = "printed by Python")]

use super::lr_scheduler::{Anneal, Decay, Ramp};

pub(crate) const GOLDEN_LR: [(Decay, [f64; 7]); 8] = [
    (Decay::Constant, [0.0001, 0.00055, 0.001, 0.001, 0.001, 0.001, 0.001]),
    (Decay::Linear, [0.0001, 0.00055, 0.001, 0.00078, 0.0003400000000000001, 1e-05, 1e-05]),
    (Decay::Cosine, [0.0001, 0.00055, 0.001, 0.0008841919993438941, 0.00025750000000000013, 1e-05, 1e-05]),
    (
        Decay::InverseSquareRoot,
        [0.0001, 0.00055, 0.001, 0.0005773502691896258, 0.0003779644730092272, 0.00031622776601683794, 1e-05],
    ),
    (Decay::Wsd { steps: 40, anneal: Anneal::Linear }, [0.0001, 0.00055, 0.001, 0.001, 0.0007525, 1e-05, 1e-05]),
    (
        Decay::Wsd { steps: 40, anneal: Anneal::Cosine },
        [0.0001, 0.00055, 0.001, 0.001, 0.000855017856687341, 1e-05, 1e-05],
    ),
    (
        Decay::Wsd { steps: 40, anneal: Anneal::Exponential },
        [0.0001, 0.00055, 0.001, 0.001, 0.0006849749022023547, 1e-05, 1e-05],
    ),
    (Decay::Wsd { steps: 40, anneal: Anneal::MinusSqrt }, [0.0001, 0.00055, 0.001, 0.001, 0.000505, 1e-05, 1e-05]),
];

pub(crate) const GOLDEN_WD: [(Ramp, [f64; 7]); 2] = [
    (Ramp::Linear, [0.0, 0.010000000000000002, 0.020000000000000004, 0.06, 0.1, 0.1, 0.1]),
    (Ramp::Cosine, [0.0, 0.0024471741852423235, 0.009549150281252633, 0.06545084971874737, 0.1, 0.1, 0.1]),
];
