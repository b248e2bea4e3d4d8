//! Tables printed by diffusers 0.42.1; reference of the tests of `schedule.rs`.

use crate::schedule::Spacing;

/// One table of diffusers.
pub(crate) struct Golden {
    pub(crate) options: &'static str,
    pub(crate) steps: usize,
    pub(crate) image_seq_len: usize,
    pub(crate) spacing: Spacing,
    pub(crate) sigmas: Vec<f32>,
    pub(crate) timesteps: Vec<f32>,
}

#[expect(clippy::unreadable_literal, reason = "printed by numpy")]
pub(crate) fn golden() -> Vec<Golden> {
    vec![
        Golden {
            options: r#"{"shift": 3.0}"#,
            steps: 5,
            image_seq_len: 1024,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.923077, 0.8181818, 0.6666667, 0.42857146, 0.0],
            timesteps: vec![1000.0, 923.07697, 818.1818, 666.6667, 428.57147],
        },
        Golden {
            options: r#"{"shift": 1.0}"#,
            steps: 1,
            image_seq_len: 64,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.0],
            timesteps: vec![1000.0],
        },
        Golden {
            options: r#"{"shift": 2.23}"#,
            steps: 7,
            image_seq_len: 64,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.93045896, 0.84790874, 0.7483221, 0.6258185, 0.4714588, 0.2709599, 0.0],
            timesteps: vec![1000.0, 930.459, 847.90875, 748.32214, 625.8185, 471.4588, 270.9599],
        },
        Golden {
            options: r#"{"use_dynamic_shifting": true, "base_shift": 0.5, "max_shift": 1.15}"#,
            steps: 6,
            image_seq_len: 15,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.8878179, 0.75994045, 0.61282575, 0.4417799, 0.24044667, 0.0],
            timesteps: vec![1000.0, 887.81793, 759.9404, 612.82574, 441.7799, 240.44667],
        },
        Golden {
            options: r#"{"use_dynamic_shifting": true, "base_shift": 0.5, "max_shift": 1.15}"#,
            steps: 28,
            image_seq_len: 3840,
            spacing: Spacing::Even,
            sigmas: vec![
                1.0, 0.9879015, 0.9751956, 0.9618352, 0.94776857, 0.9329381, 0.9172799, 0.90072256, 0.8831865,
                0.8645821, 0.84480894, 0.82375306, 0.8012856, 0.77725965, 0.7515072, 0.7238351, 0.69402075, 0.66180503,
                0.62688583, 0.5889078, 0.5474508, 0.5020136, 0.45199424, 0.3966628, 0.3351256, 0.26627654, 0.18873014,
                0.10072724, 0.0,
            ],
            timesteps: vec![
                1000.0, 987.9015, 975.19556, 961.8352, 947.76855, 932.9381, 917.2799, 900.72253, 883.1865, 864.5821,
                844.80896, 823.75305, 801.28564, 777.25964, 751.5072, 723.8351, 694.02075, 661.80505, 626.8858,
                588.9078, 547.4508, 502.0136, 451.99423, 396.6628, 335.1256, 266.27655, 188.73013, 100.72724,
            ],
        },
        Golden {
            options: r#"{"use_dynamic_shifting": true, "time_shift_type": "linear"}"#,
            steps: 5,
            image_seq_len: 960,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.7123682, 0.48152947, 0.2921746, 0.13404293, 0.0],
            timesteps: vec![1000.0, 712.36816, 481.52948, 292.17462, 134.04294],
        },
        Golden {
            options: r#"{"use_dynamic_shifting": true, "shift_terminal": 0.02, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192}"#,
            steps: 5,
            image_seq_len: 2000,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.82671875, 0.6159647, 0.35410857, 0.01999998, 0.0],
            timesteps: vec![1000.0, 826.71875, 615.9647, 354.10858, 19.99998],
        },
        Golden {
            options: r#"{"shift": 3.0, "use_karras_sigmas": true}"#,
            steps: 5,
            image_seq_len: 64,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.81676424, 0.6630951, 0.534905, 0.42857146, 0.0],
            timesteps: vec![1000.0, 816.7642, 663.0951, 534.905, 428.57147],
        },
        Golden {
            options: r#"{"shift": 3.0, "use_exponential_sigmas": true}"#,
            steps: 5,
            image_seq_len: 64,
            spacing: Spacing::Even,
            sigmas: vec![1.0, 0.8091067, 0.65465367, 0.5296847, 0.42857146, 0.0],
            timesteps: vec![1000.0, 809.1067, 654.6537, 529.6847, 428.57147],
        },
        Golden {
            options: r#"{"shift": 3.0}"#,
            steps: 5,
            image_seq_len: 64,
            spacing: Spacing::Trained,
            sigmas: vec![1.0, 0.9003591, 0.7511211, 0.50298506, 0.008928572, 0.0],
            timesteps: vec![1000.0, 900.3591, 751.1211, 502.98505, 8.928572],
        },
        Golden {
            options: r#"{"shift": 5.0}"#,
            steps: 7,
            image_seq_len: 64,
            spacing: Spacing::Trained,
            sigmas: vec![1.0, 0.9617593, 0.9097071, 0.8347121, 0.71731746, 0.50739646, 0.024414066, 0.0],
            timesteps: vec![1000.0, 961.75934, 909.70715, 834.7121, 717.31744, 507.39645, 24.414066],
        },
        Golden {
            options: r#"{"shift": 1.0}"#,
            steps: 3,
            image_seq_len: 64,
            spacing: Spacing::Trained,
            sigmas: vec![1.0, 0.5005, 0.001, 0.0],
            timesteps: vec![1000.0, 500.50003, 1.0],
        },
    ]
}
