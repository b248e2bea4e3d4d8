//! A recipe's table → typed parameters and settings, with every mistake found and placed.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use spec::{Problem, schema};

use crate::{Description, Stage};

/// Splits `table` by the property names of the two schemas and reads both halves, or says all that is wrong.
pub(crate) fn parse<S: Stage>(
    description: &Description,
    table: &Value,
) -> Result<(S::Parameters, S::Settings), Vec<Problem>> {
    let problems = schema::validate_split(&description.parameters, &description.settings, table);
    if !problems.is_empty() {
        return Err(problems);
    }
    let (parameters, settings) = schema::split(&description.settings, table);
    match (read(&parameters), read(&settings)) {
        (Ok(parameters), Ok(settings)) => Ok((parameters, settings)),
        (parameters, settings) => Err(parameters.err().into_iter().chain(settings.err()).collect()),
    }
}

fn read<T: DeserializeOwned>(value: &Value) -> Result<T, Problem> {
    T::deserialize(value).map_err(|error| {
        let problem = Problem::new(error.to_string());
        match culprit::<T>(value, &error.to_string()) {
            Some(path) => problem.field(path),
            None => problem,
        }
    })
}

/// Dotted path of the value that `message` is about: the one without which the message is another.
fn culprit<T: DeserializeOwned>(root: &Value, message: &str) -> Option<String> {
    let mut path: Vec<String> = Vec::new();
    while let Some(Value::Object(object)) = at(root, &path) {
        let guilty = object.keys().find(|key| {
            let mut without = root.clone();
            remove(&mut without, &path, key);
            T::deserialize(&without).err().is_none_or(|error| error.to_string() != message)
        });
        match guilty {
            Some(key) => path.push(key.clone()),
            None => break,
        }
    }
    (!path.is_empty()).then(|| path.join("."))
}

fn at<'a>(root: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(root, |value, key| value.get(key))
}

fn remove(root: &mut Value, path: &[String], key: &str) {
    let parent: Option<&mut Map<String, Value>> =
        path.iter().try_fold(root, |value, key| value.get_mut(key)).and_then(Value::as_object_mut);
    if let Some(parent) = parent {
        parent.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    use super::*;
    use crate::{About, Checked, Failure, Outcome, Work};

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Parameters {
        model: String,
        #[serde(default)]
        max_pixels: Option<u32>,
        #[serde(default)]
        crop: Crop,
    }

    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    struct Crop {
        policy: Policy,
        even: Even,
    }

    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    enum Policy {
        /// Middle.
        #[default]
        Center,
        /// Anywhere.
        Random,
    }

    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    #[serde(try_from = "u32", into = "u32")]
    #[schemars(with = "u32")]
    struct Even(u32);
    impl TryFrom<u32> for Even {
        type Error = String;
        fn try_from(n: u32) -> Result<Self, String> {
            if n.is_multiple_of(2) { Ok(Self(n)) } else { Err(format!("`{n}` is odd")) }
        }
    }
    impl From<Even> for u32 {
        fn from(even: Even) -> Self {
            even.0
        }
    }
    impl Clone for Even {
        fn clone(&self) -> Self {
            Self(self.0)
        }
    }

    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    struct Settings {
        workers: Option<usize>,
    }

    struct Demo;
    impl Stage for Demo {
        type Parameters = Parameters;
        type Settings = Settings;
        fn describe() -> About {
            About {
                stage: "demo",
                version: 1,
                about: "",
                inputs: &[],
                optional: &[],
                output: "x",
                tables: &[],
                measured: &[],
                resumable: false,
                devices: &["cpu"],
            }
        }
        fn check(_: &Parameters, _: &Settings, _: &crate::CheckRequest) -> Checked {
            Checked::default()
        }
        fn run(_: &Work<Self>) -> Result<Outcome, Failure> {
            Err(Failure::interrupted("nothing"))
        }
    }

    fn mistakes(table: &Value) -> Vec<(Option<String>, String, Option<String>)> {
        let description = Demo::describe().description::<Demo>();
        match parse::<Demo>(&description, table) {
            Ok(_) => Vec::new(),
            Err(problems) => problems.into_iter().map(|p| (p.field, p.message, p.help)).collect(),
        }
    }

    #[test]
    fn a_good_table_is_split_by_meaning() {
        let description = Demo::describe().description::<Demo>();
        let table = json!({"model": "m", "workers": 3, "crop": {"policy": "random"}});
        let (parameters, settings) = parse::<Demo>(&description, &table).ok().unwrap();
        assert_eq!((parameters.model.as_str(), settings.workers), ("m", Some(3)));
        assert!(matches!(parameters.crop.policy, Policy::Random));
    }

    #[test]
    fn all_mistakes_are_found_at_once_with_their_fields() {
        let seen = mistakes(&json!({
            "max_pixel": 5, "max_pixels": "many", "workers": 1.5, "crop": {"policy": "centre", "evn": 2}
        }));
        let text: Vec<String> = seen
            .iter()
            .map(|(field, message, help)| {
                format!("{}: {message} ({})", field.as_deref().unwrap_or("-"), help.as_deref().unwrap_or("-"))
            })
            .collect();
        assert_eq!(
            text,
            [
                "-: missing parameter `model` (-)",
                "crop.evn: unknown parameter `evn` (did you mean `even`?)",
                "crop.policy: `crop.policy` must be one of `center`, `random`, not the string \"centre\" (did you mean `center`?)",
                "max_pixel: unknown parameter `max_pixel` (did you mean `max_pixels`?)",
                "max_pixels: `max_pixels` must be an integer >= 0, not the string \"many\" (-)",
                "workers: `workers` must be an integer >= 0, not the number 1.5 (-)",
            ]
        );
    }

    #[test]
    fn what_only_the_type_can_refuse_still_names_its_field() {
        let seen = mistakes(&json!({"model": "m", "crop": {"even": 3}}));
        assert_eq!(seen, [(Some("crop.even".to_owned()), "`3` is odd".to_owned(), None)]);
    }
}
