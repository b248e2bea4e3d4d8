//! Looks the parameters over before anything is loaded.

use std::path::Path;

use models::{Clips, Family, ModelFolder};
use serde_json::{Value, json};
use spec::Problem;
use stage::{CheckRequest, Checked, Source, SourceKind};

use crate::checkpoint::{self, ADAPTER_FILES, ADAPTER_PLACES};
use crate::parameters::{Parameters, Settings};
use crate::plan::DEFAULT_TRUE_CFG;
use crate::prompts::{self, Prompt};

/// Files of the base model that decide a picture; what a full fine-tune replaced counts, too, since training began with it.
const PARTS: &[&str] =
    &["model_index.json", "scheduler/**", "transformer*/**", "vae/**", "text_encoder*/**", "tokenizer*/**"];

/// What is wrong, what the result depends on, and what has no effect.
pub(crate) fn check(parameters: &Parameters, settings: &Settings, request: &CheckRequest) -> Checked {
    let base_dir = request.base_dir.as_path();
    let mut checked = Checked::default();
    let mut look = None;
    match Source::model("model", &parameters.model, None, base_dir, PARTS) {
        Ok(source) => {
            if source.kind == SourceKind::Path {
                match look_at(Path::new(&source.location)) {
                    Ok(found) => look = Some(found),
                    Err(problem) => checked.problems.push(problem.field("model")),
                }
            }
            checked.sources.push(source);
        }
        Err(problem) => checked.problems.push(problem),
    }
    if let Some(written) = &parameters.lora {
        match lora_source(written, base_dir) {
            Ok(source) => checked.sources.push(source),
            Err(problem) => checked.problems.push(problem),
        }
    }
    if !request.inputs.contains("checkpoint") {
        checked.problems.extend(untrained(parameters));
    }
    if let Some(file) = &parameters.prompts_file {
        checked.consulted.push(base_dir.join(file));
    }
    match all_prompts(parameters, base_dir) {
        Ok(prompts) => {
            checked.key = key(parameters, &prompts);
            let own = parameters.negative_prompt.as_deref().into_iter();
            if let Some(text) = prompts.iter().flat_map(Prompt::texts).chain(own).find(|text| spec::looks_garbled(text))
            {
                checked
                    .notes
                    .push(format!("{text:?} looks like text read in the wrong encoding; it is drawn as it is"));
            }
            steering(parameters, &prompts, look.as_ref(), &mut checked);
        }
        Err(problems) => checked.problems.extend(problems),
    }
    checked.problems.extend(numbers(parameters, settings));
    checked.problems.extend(match &look {
        Some(look) => against_model(parameters, look),
        None => sides(parameters, 1),
    });
    if look.is_some_and(|look| !look.takes_guidance && !look.classifier_free) {
        checked.notes.push("`guidance` has no effect: the model has no guidance embedding".to_owned());
    }
    checked
}

/// What is wrong with how prompts are steered, or worth knowing of it.
fn steering(parameters: &Parameters, prompts: &[Prompt], look: Option<&Look>, checked: &mut Checked) {
    if look.is_some_and(|look| look.classifier_free) {
        // Whatever is written, `guidance` is its scale.
        return;
    }
    let negative = |prompt: &Prompt| prompt.negative_prompt.is_some() || parameters.negative_prompt.is_some();
    if parameters.true_cfg_scale.is_some() && !prompts.iter().any(negative) {
        let problem = Problem::new("`true_cfg_scale` needs a negative prompt to steer away from");
        let help = "add `negative_prompt = \"\"`, or remove `true_cfg_scale`";
        checked.problems.push(problem.help(help).field("true_cfg_scale"));
    } else if parameters.true_cfg_scale.is_none() && prompts.iter().any(negative) {
        let unless = if look.is_some() { "" } else { ", unless `guidance` of the model is that already" };
        checked.notes.push(format!(
            "a negative prompt is given: true classifier-free guidance with scale {DEFAULT_TRUE_CFG}{unless}"
        ));
    }
}

/// The prompts of the recipe and of the file.
pub(crate) fn all_prompts(parameters: &Parameters, base_dir: &Path) -> Result<Vec<Prompt>, Vec<Problem>> {
    let mut prompts: Vec<_> = parameters.prompts.iter().map(|text| Prompt::from(text.as_str())).collect();
    if let Some(file) = &parameters.prompts_file {
        prompts.extend(prompts::read(&base_dir.join(file))?);
    }
    if prompts.is_empty() {
        let problem = Problem::new("there is no prompt").help("set `prompts = [\"…\"]` or `prompts_file`");
        return Err(vec![problem.field("prompts")]);
    }
    let own = [parameters.negative_prompt.as_deref(), parameters.trigger.as_deref()];
    let texts = prompts.iter().flat_map(Prompt::texts).chain(own.into_iter().flatten());
    if let Some(text) = texts.into_iter().find(|text| text.contains('\0')) {
        let problem = Problem::new(format!("a prompt holds a NUL character: {text:?}"));
        return Err(vec![problem.help("a PNG cannot keep it with the picture; remove it").field("prompts")]);
    }
    if parameters.trigger.as_deref().is_some_and(|trigger| trigger.trim().is_empty()) {
        let problem = Problem::new("`trigger` is empty").help("name the words that call the style, or remove it");
        return Err(vec![problem.field("trigger")]);
    }
    let too_large = |prompt: &&Prompt| {
        let last = prompt.seed.unwrap_or(parameters.seed).checked_add(u64::from(parameters.images_per_prompt));
        last.is_none_or(|last| i64::try_from(last).is_err())
    };
    if let Some(prompt) = prompts.iter().find(too_large) {
        let seed = prompt.seed.unwrap_or(parameters.seed);
        return Err(vec![Problem::new(format!("seed {seed} is too large")).help("use one below 2^63").field("seed")]);
    }
    Ok(prompts)
}

/// What makes no sense in a recipe that trains nothing.
fn untrained(parameters: &Parameters) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(name) = &parameters.checkpoint {
        let problem = Problem::new(format!("`checkpoint` names `{name}`, and the recipe trains nothing"));
        problems.push(
            problem.help("add a table `[train]`, or name a trained folder as `model` or `lora`").field("checkpoint"),
        );
    }
    if parameters.with_base && parameters.lora.is_none() {
        let problem = Problem::new("`with_base` would draw every picture twice: the recipe trains nothing");
        problems.push(problem.help("remove it, or name a `lora`").field("with_base"));
    }
    problems
}

/// The semantic parameters with defaults filled in, without locations.
fn key(parameters: &Parameters, prompts: &[Prompt]) -> Value {
    let mut key = json!(parameters);
    if let Value::Object(fields) = &mut key {
        for location in ["model", "lora", "prompts_file"] {
            fields.remove(location);
        }
        if parameters.true_cfg_scale.is_none() {
            fields.insert("true_cfg_scale".to_owned(), json!(DEFAULT_TRUE_CFG));
        }
        fields.insert("prompts".to_owned(), json!(prompts));
    }
    key
}

/// A LoRA is a file, a folder with adapter files, or a Hub id.
fn lora_source(written: &str, base_dir: &Path) -> Result<Source, Problem> {
    let path = base_dir.join(written);
    if path.is_file() {
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            return Err(Problem::new(format!("`{written}` is not a `.safetensors` file")).field("lora"));
        }
        let location = path.to_string_lossy().into_owned();
        return Ok(Source { name: "lora".into(), kind: SourceKind::Path, location, revision: None, parts: Vec::new() });
    }
    if written.ends_with(".safetensors") {
        let problem = Problem::new(format!("there is no file `{}`", path.display()));
        return Err(problem.help("a relative path starts at the recipe's folder").field("lora"));
    }
    // Without a revision there is one thing that can be wrong.
    let parts = ["*.safetensors", "*adapter_config.json"];
    let source = Source::model("lora", written, None, base_dir, &parts).map_err(|_| {
        let message = format!("`{written}` is neither an existing file or folder nor a Hub id");
        let help = "write the path of a `.safetensors` file, or of a folder with one, relative to";
        Problem::new(message).help(format!("{help} `{}`, or `OWNER/NAME`", base_dir.display())).field("lora")
    })?;
    let holds_adapter = ADAPTER_PLACES.iter().any(|place| checkpoint::holds_adapter(&path.join(place)));
    if source.kind == SourceKind::Path && !holds_adapter {
        let problem = Problem::new(format!("folder `{written}` holds no adapter"));
        let help = format!("expected `{}` in it", ADAPTER_FILES.join("` or `"));
        return Err(problem.help(help).field("lora"));
    }
    Ok(source)
}

/// Values outside their range, whatever the model.
fn numbers(parameters: &Parameters, settings: &Settings) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut expect = |good: bool, name: &str, value: &dyn std::fmt::Display, expected: &str| {
        if !good {
            problems.push(Problem::new(format!("`{name}` is {value}, expected {expected}")).field(name));
        }
    };
    expect(parameters.steps > 0, "steps", &parameters.steps, "1 or more");
    expect(parameters.images_per_prompt > 0, "images_per_prompt", &parameters.images_per_prompt, "1 or more");
    expect(parameters.max_sequence_length > 0, "max_sequence_length", &parameters.max_sequence_length, "1 or more");
    expect(parameters.guidance.is_finite(), "guidance", &parameters.guidance, "a number");
    let second = parameters.guidance_2;
    expect(second.is_none_or(f64::is_finite), "guidance_2", &second.unwrap_or_default(), "a number");
    expect(parameters.lora_scale.is_finite(), "lora_scale", &parameters.lora_scale, "a number");
    expect(settings.batch_size > 0, "batch_size", &settings.batch_size, "1 or more");
    if let Some(scale) = parameters.true_cfg_scale {
        expect(scale > 1.0 && scale.is_finite(), "true_cfg_scale", &scale, "a number above 1, which is no guidance");
    }
    problems
}

/// What does not fit the model.
pub(crate) fn against_model(parameters: &Parameters, look: &Look) -> Vec<Problem> {
    let mut problems = Vec::new();
    let (tokens, limit) = (parameters.max_sequence_length, look.max_tokens);
    if tokens as usize > limit {
        let message = format!("`max_sequence_length` is {tokens}, expected at most {limit}");
        problems.push(Problem::new(message).field("max_sequence_length"));
    }
    problems.extend(sides(parameters, look.unit));
    problems.extend(length(parameters, look.clips));
    problems.extend(second_guidance(parameters, look.denoisers));
    if look.classifier_free && parameters.true_cfg_scale.is_some() {
        let problem =
            Problem::new("`true_cfg_scale` has no place here: this model's `guidance` is classifier-free guidance");
        problems.push(problem.help("set `guidance` instead").field("true_cfg_scale"));
    }
    problems
}

/// Frames when the recipe names none: those of a Wan pipeline.
pub(crate) const DEFAULT_FRAMES: u32 = 81;

/// What of the length of a clip does not fit the model.
fn length(parameters: &Parameters, clips: Option<Clips>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let frames = parameters.frames.unwrap_or(DEFAULT_FRAMES);
    match clips {
        Some(clips) if !clips.allows(frames) => {
            let message = format!("`frames` is {frames}, expected 1 + {} n", clips.stride);
            let near = clips.trimmed(frames.max(1));
            problems.push(Problem::new(message).help(format!("the next below is {near}")).field("frames"));
        }
        None => {
            let given = [("frames", parameters.frames.is_some_and(|n| n != 1)), ("fps", parameters.fps.is_some())];
            for (name, _) in given.into_iter().filter(|(_, given)| *given) {
                let problem = Problem::new(format!("`{name}` is for models of clips; this one draws pictures"));
                problems.push(problem.help(format!("remove `{name}`")).field(name));
            }
        }
        Some(_) => {}
    }
    if parameters.fps == Some(0) {
        problems.push(Problem::new("`fps` is 0, expected 1 or more").field("fps"));
    }
    problems
}

/// Guidance of a second denoiser that the model does not have, or that guides nothing.
fn second_guidance(parameters: &Parameters, denoisers: usize) -> Option<Problem> {
    let second = parameters.guidance_2?;
    let problem = if denoisers < 2 {
        Problem::new(format!("`guidance_2` is {second}, but the model has one denoiser"))
    } else if parameters.guidance <= 1.0 {
        let guidance = parameters.guidance;
        Problem::new(format!(
            "`guidance_2` is {second} and has no effect: `guidance` is {guidance}, which is no guidance"
        ))
    } else {
        return None;
    };
    Some(problem.help("remove `guidance_2`").field("guidance_2"))
}

/// Width and height that are not multiples of `unit`. diffusers rounds them down; a picture of another size than asked is no answer.
fn sides(parameters: &Parameters, unit: u32) -> Vec<Problem> {
    let problem = |(name, side): (&str, u32)| {
        let near = (side.saturating_add(unit / 2) / unit * unit).max(unit);
        let problem = Problem::new(format!("`{name}` is {side}, expected a multiple of {unit}"));
        (side == 0 || side % unit != 0).then(|| problem.help(format!("the nearest is {near}")).field(name))
    };
    [("width", parameters.width), ("height", parameters.height)].into_iter().filter_map(problem).collect()
}

/// What a model says about the parameters.
pub(crate) struct Look {
    /// Whether the denoiser embeds a guidance scale.
    pub(crate) takes_guidance: bool,
    /// Whether `guidance` is classifier-free guidance.
    classifier_free: bool,
    denoisers: usize,
    /// How it sees time, if it does.
    pub(crate) clips: Option<Clips>,
    unit: u32,
    max_tokens: usize,
}

impl Look {
    /// Reads the model's configuration.
    pub(crate) fn of(family: &dyn Family, folder: &ModelFolder) -> models::Result<Self> {
        Ok(Self {
            takes_guidance: family.takes_guidance(folder)?,
            classifier_free: family.sampling().classifier_free,
            denoisers: family.denoisers(folder)?.len(),
            clips: family.clips(folder)?,
            unit: family.pixel_unit(folder)?,
            max_tokens: family.max_tokens(),
        })
    }
}

/// Looks at a local model, whose components must all be there.
fn look_at(path: &Path) -> Result<Look, Problem> {
    let problem = |error: models::Error| {
        let help = miette::Diagnostic::help(&error).map(|help| help.to_string());
        Problem { help, ..Problem::new(error.to_string()) }
    };
    let folder = ModelFolder::open(path).map_err(problem)?;
    let family = models::family_of(&folder).map_err(problem)?;
    for part in family.generate_parts() {
        let fixed = part.split(['*', '?', '[']).next().unwrap_or_default().trim_end_matches('/');
        if !fixed.is_empty() && !path.join(fixed).exists() {
            return Err(Problem::new(format!("model folder `{}` has no `{fixed}`", path.display()))
                .help("`generate` needs a complete diffusers folder"));
        }
    }
    Look::of(family, &folder).map_err(problem)
}
