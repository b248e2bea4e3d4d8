//! Looks the training recipe over, and holds it against the model's configuration: when the model lies on this machine, and else
//! when it was fetched. No weights are read.

use std::path::Path;

use models::{Family, ModelFolder};
use nn::{BuildOptions, Builder};
use spec::mesh::Axis;
use spec::{Mesh, Problem};
use stage::{Checked, Source, SourceKind};
use tch::{Device, Kind};

use crate::config::{self, Config, Loaded};
use crate::{Parameters, Settings, experts, session};

/// Files of the model that a checkpoint is made from: all of its pipeline.
const PARTS: &[&str] =
    &["model_index.json", "scheduler/**", "transformer*/**", "vae/**", "text_encoder*/**", "tokenizer*/**"];

/// What is wrong, what the result depends on, and what has no effect.
pub(crate) fn check(parameters: &Parameters, settings: &Settings, base_dir: &Path, ranks: usize) -> Checked {
    let mut checked = Checked::default();
    checked.consulted.extend(parameters.config.iter().map(|config| base_dir.join(config)));
    let loaded = match config::load(parameters.config.as_deref(), parameters.table(settings), base_dir) {
        Ok(loaded) => loaded,
        Err(problem) => {
            checked.problems.push(problem);
            return checked;
        }
    };
    checked.written.extend(loaded.written());
    let Config { model, checkpoint, .. } = &loaded.config;
    let mesh = loaded.config.distributed.mesh(ranks);
    checked.key = serde_json::to_value(&loaded.config).unwrap_or_default();
    if !model.name.is_empty() {
        match Source::model("model", &model.name, model.revision.as_deref(), base_dir, PARTS) {
            Ok(source) => {
                if source.kind == SourceKind::Path {
                    checked.problems.extend(against_model(&loaded, mesh.as_ref().ok(), Path::new(&source.location)));
                }
                checked.sources.push(source);
            }
            Err(problem) => checked.problems.push(name_problem(problem, parameters, &loaded)),
        }
    }
    if let Some(from) = &checkpoint.restore_from {
        match restored(from, base_dir) {
            Ok(source) => checked.sources.push(source),
            Err(problem) => checked.problems.push(loaded.place("checkpoint.restore_from", problem)),
        }
    }
    match mesh {
        Ok(mesh) => {
            let refused = loaded.config.refused_on(&mesh);
            checked.problems.extend(refused.map(|(path, problem)| loaded.place(path, problem)));
        }
        Err(problem) => {
            let path = problem.field.clone().unwrap_or_default();
            checked.problems.push(loaded.place(&path, problem));
        }
    }
    checked.notes.extend(loaded.notes);
    checked.notes.extend(loaded.config.distributed.remarks(ranks));
    checked.problems.extend(loaded.problems);
    checked
}

/// Puts a mistake in the model's name where the name was written.
fn name_problem(problem: Problem, parameters: &Parameters, loaded: &Loaded) -> Problem {
    match (&parameters.model, &parameters.base_model) {
        (None, Some(_)) => problem.field("base_model"),
        _ => loaded.place("model.pretrained_model_name_or_path", Problem { field: None, ..problem }),
    }
}

/// The training state to start from.
fn restored(from: &str, base_dir: &Path) -> Result<Source, Problem> {
    let folder = base_dir.join(from);
    if !folder.join("training_state/state.json").is_file() {
        let message = format!("`{from}` holds no `training_state/state.json`");
        return Err(Problem::new(message).help("name a folder `epoch_E_step_S` that this stage wrote, or `LATEST`"));
    }
    Ok(Source {
        name: "restore_from".to_owned(),
        kind: SourceKind::Path,
        location: folder.to_string_lossy().into_owned(),
        revision: None,
        parts: vec!["training_state/**".to_owned()],
    })
}

/// Mistakes that only show against the model's own configuration.
fn against_model(loaded: &Loaded, mesh: Option<&Mesh>, path: &Path) -> Vec<Problem> {
    let found = ModelFolder::open(path).and_then(|folder| Ok((models::family_of(&folder)?, folder)));
    match found {
        Ok((family, folder)) => against_family(loaded, mesh, family, &folder),
        Err(error) => vec![loaded.place("model.pretrained_model_name_or_path", problem_of(&error))],
    }
}

/// As [`against_model`], for a model that was opened.
pub(crate) fn against_family(
    loaded: &Loaded,
    mesh: Option<&Mesh>,
    family: &'static dyn Family,
    folder: &ModelFolder,
) -> Vec<Problem> {
    let config = &loaded.config;
    let mut problems = Vec::new();
    let mut refuse = |path: &str, problem: Problem| problems.push(loaded.place(path, problem));
    let names = [
        ("model.model_type", config.model.family.as_deref()),
        ("flow_matching.adapter_type", config.flow_matching.family),
    ];
    for (path, name) in names {
        if let Some(name) = name.filter(|name| *name != family.name()) {
            let message = format!("`{path}` is `{name}`, but the model is a `{}`", family.name());
            refuse(
                path,
                Problem::new(message)
                    .help(format!("name a training recipe of `{}` as `config`, or remove it", family.name())),
            );
        }
    }
    let class = folder.index["transformer"][1].as_str();
    if let (Some(asked), Some(class)) = (config.model.transformer_class.as_deref(), class)
        && asked != class
    {
        let message = format!("`model.pipeline_spec.transformer_cls` is `{asked}`, but the model has a `{class}`");
        refuse("model.pipeline_spec.transformer_cls", Problem::new(message));
    }
    match experts::all(config, family, folder) {
        Err(error) => refuse("model.pretrained_model_name_or_path", problem_of(&error)),
        Ok(all) => {
            let shared = |trained: Vec<_>| experts::shared(config, &trained, mesh.unwrap_or(&Mesh::alone()));
            if let Err(mistake) = experts::trained(config, &all).and_then(shared) {
                let (path, problem) = *mistake;
                refuse(path, problem);
            }
        }
    }
    let adapter = session::adapter_spec(config, family);
    let has_peft = adapter.is_some();
    let options = BuildOptions { device: Device::Cpu, storage: Kind::Float, trainable: true, adapter };
    let builder = Builder::meta(options.clone());
    match family.transformer(folder, &builder) {
        Err(error) => refuse("model.pretrained_model_name_or_path", problem_of(&error)),
        Ok(model) => match builder.finish() {
            Err(error) => refuse(if has_peft { "peft.target_modules" } else { "model" }, problem_of(&error)),
            Ok(parameters) => {
                if let Some((path, problem)) = mesh.and_then(|mesh| {
                    let chunks = config.distributed.chunks;
                    divided(config, mesh, family, folder, options)
                        .or_else(|| cut(mesh, chunks, model.as_ref(), &parameters))
                }) {
                    refuse(path, problem);
                }
            }
        },
    }
    // What the model can draw, not the coarser grid on which its buckets are laid out. A folder without a VAE is told elsewhere.
    if let (Some(samples), Ok(unit)) = (&config.samples, family.pixel_unit(folder)) {
        for (path, side) in [("samples.width", samples.width), ("samples.height", samples.height)] {
            if side == 0 || side % unit != 0 {
                let message = format!("`{path}` is {side}, which is not a multiple of {unit}");
                refuse(path, Problem::new(message).help(format!("use {}", (side / unit).max(1) * unit)));
            }
        }
    }
    problems
}

/// Layers that cannot be divided as the mesh asks.
fn divided(
    config: &Config,
    mesh: &Mesh,
    family: &'static dyn Family,
    folder: &ModelFolder,
    options: BuildOptions,
) -> Option<(&'static str, Problem)> {
    let builder = Builder::meta(options).divided(parallel::tokens::division(mesh)?);
    let Err(error) = family.transformer(folder, &builder) else {
        return state_divided(config, mesh, &builder.finish().ok()?);
    };
    let [tp, cp] = [Axis::Tp, Axis::Cp].map(|axis| mesh.degree(axis));
    let key = if tp > 1 { "fsdp.tp_size" } else { "fsdp.cp_size" };
    let (ulysses, ring) = (mesh.ulysses(), cp / mesh.ulysses());
    let message = match (tp > 1, ulysses > 1) {
        (true, true) => format!("tp_size {tp} × cp_ulysses_degree {ulysses}: {error}"),
        (true, false) => format!("tp_size {tp}: {error}"),
        _ => format!("cp_ulysses_degree {ulysses}: {error}"),
    };
    let help = if ulysses > 1 {
        format!("`cp_ring_degree: {cp}` in place of {ring} leaves all heads on each rank")
    } else {
        "choose a size that divides them, or `cp_size`, which divides tokens".to_owned()
    };
    Some((key, Problem::new(message).help(help)))
}

/// Optimizer state in blocks that the mesh would divide.
fn state_divided(config: &Config, mesh: &Mesh, parameters: &nn::Parameters) -> Option<(&'static str, Problem)> {
    let kept = config.kept();
    let check = |named: &nn::Named| {
        let share = parameters.shares.get(&named.name)?;
        kept.exp_avg.check(&named.name, share).and_then(|()| kept.exp_avg_sq.check(&named.name, share)).err()
    };
    let error = parameters.trainable().iter().find_map(check)?;
    let message = format!("tp_size {}: {error}, so the numbers would not be those of one rank", mesh.degree(Axis::Tp));
    Some(("optimizer.state_dtype", Problem::new(message).help("use `bfloat16`, or another `fsdp.tp_size`")))
}

/// Blocks that are too few for the mesh.
fn cut(
    mesh: &Mesh,
    chunks: usize,
    model: &dyn nn::Transformer,
    parameters: &nn::Parameters,
) -> Option<(&'static str, Problem)> {
    let stages = mesh.degree(Axis::Pp);
    if stages == 1 {
        return None;
    }
    let outline = parallel::Outline::of(model, parameters);
    let error = outline.and_then(|outline| outline.stages(stages * chunks)).err()?;
    let (key, sizes) = match chunks {
        1 => ("fsdp.pp_size", format!("pp_size {stages}")),
        _ => ("fsdp.pp_virtual_stages", format!("pp_size {stages} × pp_virtual_stages {chunks}")),
    };
    Some((key, Problem::new(format!("{sizes}: {error}"))))
}

fn problem_of(error: &(impl miette::Diagnostic + 'static)) -> Problem {
    let mut problem = Problem::new(error.to_string());
    problem.help = error.help().map(|help| help.to_string());
    problem
}
