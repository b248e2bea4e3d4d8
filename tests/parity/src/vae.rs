//! VAE encoding, sampling and decoding are those of diffusers.

use tch::Tensor;

use crate::support::{Report, goldens, options};

#[test]
fn posterior_latents_and_pixels_are_equal() {
    for golden in goldens() {
        let mut report = Report::new(&golden);
        let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
        let x = golden.tensor("vae/x");
        let posterior = vae.posterior(&x).unwrap();
        report.close("vae", "mean", &posterior.mean, &golden.tensor("vae/mean"));
        report.close("vae", "logvar", &posterior.logvar, &golden.tensor("vae/logvar"));
        let latents = vae.encode(&x, None).unwrap();
        report.close("vae", "latents", &latents, &golden.tensor("vae/latents"));
        report.close(
            "vae",
            "decoded",
            &vae.decode(&golden.tensor("vae/latents")).unwrap(),
            &golden.tensor("vae/decoded"),
        );
        let (width, height) = (x.size()[3] as u32, x.size()[2] as u32);
        assert_eq!(vae.latent_shape(width, height), latents.size()[1..]);
    }
}

#[test]
fn a_sample_of_the_posterior_is_mean_plus_deviation_times_noise() {
    for golden in goldens() {
        let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
        let (mean, logvar) = (golden.tensor("vae/mean"), golden.tensor("vae/logvar"));
        let noise = Tensor::ones_like(&mean) * 0.5;
        let n = vae.normalisation();
        let expected = (mean + (logvar / 2.0).exp() * 0.5 - n.shift) * n.scale;
        let error = crate::support::relative(&vae.encode(&golden.tensor("vae/x"), Some(&noise)).unwrap(), &expected);
        assert!(error < 1e-5, "{error}");
    }
}

#[test]
fn pictures_the_vae_cannot_halve_are_refused() {
    let golden = &goldens()[0];
    let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
    let error = vae.encode(&Tensor::zeros([1, 3, 33, 32], tch::kind::FLOAT_CPU), None).unwrap_err().to_string();
    assert!(error.contains("[1, 3, 33, 32]"), "{error}");
}
