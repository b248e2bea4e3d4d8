//! VAE encoding, sampling and decoding are those of diffusers.

use models::Vae;
use models::autoencoder_kl_wan::{AutoencoderKlWan, Config};
use nn::{Builder, Weights};
use tch::{Kind, Tensor};

use crate::support::{Report, goldens, goldens_of, options, relative};

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
        let size: Vec<u32> = x.size().iter().map(|side| *side as u32).collect();
        let (&[height, width], frames) = (size.last_chunk().unwrap(), if size.len() == 5 { size[2] } else { 1 });
        assert_eq!(vae.latent_shape(width, height, frames), latents.size()[1..]);
    }
}

#[test]
fn a_sample_of_the_posterior_is_mean_plus_deviation_times_noise() {
    for golden in goldens() {
        let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
        let (mean, logvar) = (golden.tensor("vae/mean"), golden.tensor("vae/logvar"));
        let noise = Tensor::ones_like(&mean) * 0.5;
        let expected = vae.normalisation().apply(&(mean + (logvar / 2.0).exp() * 0.5)).unwrap();
        let error = crate::support::relative(&vae.encode(&golden.tensor("vae/x"), Some(&noise)).unwrap(), &expected);
        assert!(error < 1e-5, "{error}");
    }
}

#[test]
fn a_picture_is_a_clip_of_one_frame() {
    for golden in goldens_of("wan") {
        let mut report = Report::new(&golden);
        let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
        let posterior = vae.posterior(&golden.tensor("vae/image_x")).unwrap();
        report.close("vae", "mean of a picture", &posterior.mean, &golden.tensor("vae/image_mean"));
        // The foreign set decodes the mean without the inverse of the normalisation.
        let latents = vae.normalisation().apply(&posterior.mean).unwrap();
        report.close("vae", "decoded picture", &vae.decode(&latents).unwrap(), &golden.tensor("vae/image_decoded"));
    }
}

#[test]
fn tiles_are_those_of_diffusers() {
    let golden = &goldens_of("wan").into_iter().find(|golden| golden.find("vae/tiled_x").is_some()).unwrap();
    let mut report = Report::new(golden);
    let weights = Weights::open(&golden.folder.path.join("vae"), "diffusion_pytorch_model").unwrap();
    let builder = Builder::from_weights(weights, options(false));
    let mut vae = AutoencoderKlWan::new(Config::read(&golden.folder).unwrap(), &builder, Kind::Float).unwrap();
    let x = golden.tensor("vae/tiled_x");
    let whole = vae.posterior(&x).unwrap().mean;
    vae.set_tiles(24, 16);
    let mean = vae.posterior(&x).unwrap().mean;
    report.close("vae", "mean by tiles", &mean, &golden.tensor("vae/tiled_mean"));
    let latents = vae.normalisation().apply(&golden.tensor("vae/tiled_mean")).unwrap();
    report.close("vae", "decoded by tiles", &vae.decode(&latents).unwrap(), &golden.tensor("vae/tiled_decoded"));
    assert!(relative(&mean, &whole) > 1e-3, "tiles were used");
    let flux = &goldens_of("flux")[0];
    let mut vae = flux.family.vae(&flux.folder, options(false)).unwrap();
    assert!(vae.set_tiling(true).unwrap_err().to_string().contains("tiles"));
}

#[test]
fn sizes_the_vae_cannot_halve_are_refused() {
    for (family, shape, expected) in
        [("flux", &[1, 3, 33, 32][..], "[1, 3, 33, 32]"), ("wan", &[1, 3, 4, 32, 32], "1 + 4 n frames")]
    {
        let golden = &goldens_of(family)[0];
        let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
        let error = vae.encode(&Tensor::zeros(shape, tch::kind::FLOAT_CPU), None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
