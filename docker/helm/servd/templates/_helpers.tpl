{{- define "servd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "servd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "servd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "servd.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "servd.selector" -}}
app.kubernetes.io/name: {{ include "servd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "servd.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "servd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* The name of the Secret, and the keys that it has. */ -}}
{{- define "servd.secret" -}}
{{- default (include "servd.fullname" .) .Values.existingSecret -}}
{{- end -}}

{{- define "servd.secretKeys" -}}
{{- if .Values.existingSecret -}}
{{- join "," .Values.existingSecretKeys -}}
{{- else -}}
{{- $keys := list -}}
{{- if .Values.apiKey }}{{ $keys = append $keys "api-key" }}{{ end -}}
{{- if .Values.apiKeyFile }}{{ $keys = append $keys "keys.toml" }}{{ end -}}
{{- if .Values.hf_token }}{{ $keys = append $keys "hf-token" }}{{ end -}}
{{- join "," $keys -}}
{{- end -}}
{{- end -}}

{{- /* The options of `servd serve`: those that the chart needs, then those of servdConfig. */ -}}
{{- define "servd.config" -}}
{{- $options := dict "model" .Values.modelURL "host" "0.0.0.0" "port" 8000 "shutdown-timeout" .Values.shutdownTimeout -}}
{{- if has "keys.toml" (splitList "," (include "servd.secretKeys" .)) -}}
{{- $_ := set $options "api-key-file" "/etc/servd/keys/keys.toml" -}}
{{- end -}}
{{- toYaml (merge (deepCopy .Values.servdConfig) $options) -}}
{{- end -}}

{{- define "servd.scaled" -}}
{{- if or .Values.autoscaling.enabled .Values.keda.enabled }}true{{ end -}}
{{- end -}}

{{- /* The most replicas that may run at once. */ -}}
{{- define "servd.maxReplicas" -}}
{{- if .Values.keda.enabled }}{{ .Values.keda.maxReplicaCount }}
{{- else if .Values.autoscaling.enabled }}{{ .Values.autoscaling.maxReplicas }}
{{- else }}{{ .Values.replicaCount }}{{ end -}}
{{- end -}}

{{- /* True if the cache is a volume that one node alone can mount. */ -}}
{{- define "servd.oneNode" -}}
{{- if and .Values.pvcStorage (not .Values.existingClaim) (eq .Values.kind "Deployment") -}}
{{- if not (has "ReadWriteMany" .Values.pvcAccessMode) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- define "servd.check" -}}
{{- if and .Values.autoscaling.enabled .Values.keda.enabled -}}
{{- fail "autoscaling and keda exclude each other: KEDA makes the HorizontalPodAutoscaler itself" -}}
{{- end -}}
{{- if and (include "servd.oneNode" .) (gt (int (include "servd.maxReplicas" .)) 1) -}}
{{- fail "several replicas cannot share a volume with ReadWriteOnce: set pvcAccessMode to [ReadWriteMany], or kind to StatefulSet for a volume each" -}}
{{- end -}}
{{- end -}}
